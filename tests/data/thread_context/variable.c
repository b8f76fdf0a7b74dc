/* A runtime's parts of a program: the variable that readers look for, and its only writer. */
__thread void *otel_thread_ctx_v1;

void attach(void *record)
{
	*(void *volatile *)&otel_thread_ctx_v1 = record;
}

#ifdef LARGE /* too large for the dynamic linker's reserve in the threads' static TLS blocks */
__thread char room[1 << 20];

char *touch(void)
{
	return room;
}
#endif
