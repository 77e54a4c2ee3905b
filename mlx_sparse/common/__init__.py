"""What methods and engines share."""
