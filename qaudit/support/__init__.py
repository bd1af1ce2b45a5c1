"""Files of strangers, names of keys, patterns, plug-ins and sizes: nothing here knows a model."""
