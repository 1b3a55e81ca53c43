"""From one configuration to what a cluster understands."""
