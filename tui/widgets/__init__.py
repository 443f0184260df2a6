"""Line-API widgets. Law: only changed rows are drawn again."""
