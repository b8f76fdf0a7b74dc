# 32-bit code with frame pointers: _start calls outer, which calls inner, which loops.
	.globl _start
_start:
	xor %ebp, %ebp
	call outer
	hlt
outer:
	push %ebp
	mov %esp, %ebp
	call inner
	pop %ebp
	ret
inner:
	push %ebp
	mov %esp, %ebp
1:	inc %eax
	jmp 1b
