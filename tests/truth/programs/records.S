/* arm64 functions with sp-based tables, as GCC generates them, with and without frame records. */
	.text
	.globl	_start
	.type	_start, %function
_start:
	.cfi_startproc
	.cfi_undefined x30
	bl	at_bottom
	brk	#1
	.cfi_endproc

/* The record is below the locals. */
	.type	at_bottom, %function
at_bottom:
	.cfi_startproc
	stp	x29, x30, [sp, #-48]!
	.cfi_def_cfa_offset 48
	.cfi_offset x29, -48
	.cfi_offset x30, -40
	mov	x29, sp
	bl	in_middle
	ldp	x29, x30, [sp], #48
	.cfi_def_cfa_offset 0
	.cfi_restore x29
	.cfi_restore x30
	ret
	.cfi_endproc

/* Outgoing arguments are below the record. */
	.type	in_middle, %function
in_middle:
	.cfi_startproc
	sub	sp, sp, #160
	.cfi_def_cfa_offset 160
	stp	x29, x30, [sp, #32]
	.cfi_offset x29, -128
	.cfi_offset x30, -120
	add	x29, sp, #32
	bl	no_record
	ldp	x29, x30, [sp, #32]
	.cfi_restore x29
	.cfi_restore x30
	add	sp, sp, #160
	.cfi_def_cfa_offset 0
	ret
	.cfi_endproc

	.type	no_record, %function
no_record:
	.cfi_startproc
	str	x30, [sp, #-16]!
	.cfi_def_cfa_offset 16
	.cfi_offset x30, -16
	bl	_start
	ldr	x30, [sp], #16
	.cfi_def_cfa_offset 0
	.cfi_restore x30
	ret
	.cfi_endproc

	.type	untabled, %function
untabled:
	nop
	bl	_start
	nop
	ret
