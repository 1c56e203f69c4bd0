"""What a deployment needs around the services."""
