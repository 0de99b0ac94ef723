"""The encoder: decodes images and clips, cuts them into patches, packs them under token budgets and runs the vision
tower."""
