// Keeps a compiler busy for a minute: a thousand functions with many kinds of statements.
#define FUNCTION(n) \
	struct s##n { int a[n % 7 + 2]; double b; struct s##n *next; }; \
	double f##n(struct s##n *s, long x, const char *text) \
	{ \
		double sum = s->b * n; \
		for (long i = 0; i < x; i++) { \
			switch ((i * n + text[i % 9]) % 6) { \
			case 0: sum += s->a[i % (n % 7 + 2)] * 0.5; break; \
			case 1: sum -= (x ^ i) % (n + 3); continue; \
			case 2: s = s->next ? s->next : s; break; \
			case 3: if (sum > 1e9) goto out; /* fall through */ \
			case 4: s->a[0] += (int)(sum / (i + 1)) << n % 13; break; \
			default: sum = __builtin_sqrt(sum * sum + text[(i + n) % 5]); \
			} \
			for (int j = 0; j < n % 7 + 2; j++) \
				s->a[j] = s->a[j] * (n | 1) + j % (i + 1); \
		} \
	out: \
		return s->next && x > 1 ? sum + f##n(s->next, x / 2, text + 1) : sum; \
	}
#define TEN(n) \
	FUNCTION(n##0) FUNCTION(n##1) FUNCTION(n##2) FUNCTION(n##3) FUNCTION(n##4) \
	FUNCTION(n##5) FUNCTION(n##6) FUNCTION(n##7) FUNCTION(n##8) FUNCTION(n##9)
#define HUNDRED(n) \
	TEN(n##0) TEN(n##1) TEN(n##2) TEN(n##3) TEN(n##4) \
	TEN(n##5) TEN(n##6) TEN(n##7) TEN(n##8) TEN(n##9)

HUNDRED(1) HUNDRED(2) HUNDRED(3) HUNDRED(4) HUNDRED(5)
HUNDRED(6) HUNDRED(7) HUNDRED(8) HUNDRED(9) HUNDRED(10)
