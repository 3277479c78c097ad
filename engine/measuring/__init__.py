"""How long each op takes on this device, beside what the device can do at best."""
