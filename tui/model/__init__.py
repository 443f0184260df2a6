"""The view model: what the screens show, folded from feed items. Law: no Textual, no clock, everything bounded."""
