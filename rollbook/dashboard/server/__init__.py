"""The HTTP server of the dashboard: JSON, server-sent events and the page."""
