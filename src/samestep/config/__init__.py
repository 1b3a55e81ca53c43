"""The configuration: composed, checked, and refused with one clear message. No torch here."""
