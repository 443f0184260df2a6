"""The nine views: each turns the model into rows. Law: a view never changes the model and never awaits anything."""
