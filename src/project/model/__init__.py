"""What is learned, and how: classifier (the recipe), metrics, schedules and the nets."""
