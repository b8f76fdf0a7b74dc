/* What a runtime adds to a program: the variable that readers look for, and its only writer. */
__thread void *otel_thread_ctx_v1;

void attach(void *record)
{
	*(void *volatile *)&otel_thread_ctx_v1 = record;
}

#ifdef LARGE /* more than the dynamic linker has room for in the static blocks of threads */
__thread char room[1 << 20];

char *touch(void)
{
	return room;
}
#endif
