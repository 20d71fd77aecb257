"""Pure arithmetic: models, boxes, grids, names, layouts, plans and the object format."""
