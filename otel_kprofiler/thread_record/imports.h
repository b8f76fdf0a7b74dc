/* Replaces functions where the libraries of this process import them. */
#pragma once

struct import {
	const char *name; /* NULL: the end of a list */
	void *function;
};

/* Replaces the imports of all libraries but this one, if any was loaded since the last call. */
void replace_imports(const struct import *imports);
