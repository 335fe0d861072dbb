from rollbook.contracts.plugin import hide_warnings_of_torchao

hide_warnings_of_torchao()
