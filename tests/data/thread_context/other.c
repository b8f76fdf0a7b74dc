/* A library with a thread-local variable of its own. */
__thread char variable;

char *touch_other(void)
{
	return &variable;
}
