/* A library with a different thread-local variable. */
__thread char variable;

char *touch_other(void)
{
	return &variable;
}
