"""Shows a run to a person: live terminal view and plots."""
