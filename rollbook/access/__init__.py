"""Who may call our servers, and who may read our files."""
