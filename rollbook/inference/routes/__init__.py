"""The HTTP routes of the policy server, one noun a file."""
