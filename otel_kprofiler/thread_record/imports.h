/* Replaces functions that libraries in this process import. */
#pragma once

struct import {
	const char *name; /* NULL terminates the list */
	void *function;
};

/* Replaces the imports of all other libraries, if a library has been loaded since the last call. */
void replace_imports(const struct import *imports);
