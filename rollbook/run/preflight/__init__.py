"""The pre-flight: finds in a few seconds what would otherwise stop a run after a minute."""
