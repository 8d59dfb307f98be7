"""What this device is and can do."""
