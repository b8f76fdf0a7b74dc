// x86-64 functions (System V ABI), each of which spends its time under one rule of its table.
// They overwrite anything that the rule must not depend on. The caller finds its frame by %rbp.

#define SPIN mov $20000, %ecx; 1: dec %ecx; jnz 1b
#define PUSH_FP push %rbp; .cfi_def_cfa_offset 16; .cfi_offset %rbp, -16; mov %rsp, %rbp

.macro function name
	.globl \name
	.type \name, @function
\name:
	.cfi_startproc
.endm

.macro end_function name
	.cfi_endproc
	.size \name, . - \name
.endm

	.text
function all_rules
	PUSH_FP
	.cfi_def_cfa_register %rbp
	call cfa_in_memory
	call cfa_of_a_plt_entry
	call restored
	call restored_extended
	call fp_by_expression
	call signed_factors
	call extended_offset
	call def_cfa
	call nested_states
	call advanced
	call cfa_by_a_preserved_register
	sub $32768, %rsp
	call cfa_on_another_stack
	add $32768, %rsp
	call ends_with_a_call
	call ends_with_a_system_call
	pop %rbp
	.cfi_def_cfa %rsp, 8
	ret
end_function all_rules

// def_cfa_expression: breg6 -8; deref
function cfa_in_memory
	PUSH_FP
	.cfi_def_cfa_register %rbp
	sub $32, %rsp
	lea 16(%rbp), %rax
	mov %rax, -8(%rbp)
	.cfi_escape 0x0f, 0x03, 0x76, 0x78, 0x06
	SPIN
	.cfi_def_cfa %rbp, 16
	leave
	.cfi_def_cfa %rsp, 8
	ret
end_function cfa_in_memory

// def_cfa_expression: rsp + 8 + (pc & 15 >= 11) * 8
	.p2align 4
function cfa_of_a_plt_entry
	.cfi_escape 0x0f, 0x0b, 0x77, 0x08, 0x80, 0x00, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22
	mov $20000, %ecx
	push $0
	nop
	nop
	nop
	nop
1:	dec %ecx
	jnz 1b
	pop %rax
	ret
end_function cfa_of_a_plt_entry

function restored
	push %rbp
	.cfi_def_cfa_offset 16
	.cfi_offset %rbp, -16
	pop %rbp
	.cfi_def_cfa_offset 8
	.cfi_restore %rbp
	movq $1, -8(%rsp)
	SPIN
	ret
end_function restored

function restored_extended
	push %rbp
	.cfi_def_cfa_offset 16
	.cfi_offset %rbp, -16
	pop %rbp
	.cfi_def_cfa_offset 8
	.cfi_escape 0x06, 0x06
	movq $1, -8(%rsp)
	SPIN
	ret
end_function restored_extended

// expression: rbp is saved at breg6 + 0
function fp_by_expression
	push %rbp
	.cfi_def_cfa_offset 16
	mov %rsp, %rbp
	.cfi_def_cfa_register %rbp
	.cfi_escape 0x10, 0x06, 0x02, 0x76, 0x00
	sub $64, %rsp
	SPIN
	leave
	.cfi_def_cfa %rsp, 8
	.cfi_restore %rbp
	ret
end_function fp_by_expression

// offset_extended_sf, def_cfa_offset_sf: times the data alignment, -8. (pyelftools decodes
// def_cfa_sf wrongly, so it cannot be the reference.)
function signed_factors
	push %rbp
	.cfi_def_cfa_offset 16
	.cfi_escape 0x11, 0x06, 0x02
	mov $1, %ebp
	SPIN
	sub $16, %rsp
	.cfi_escape 0x13, 0x7c
	mov $20000, %ecx
2:	dec %ecx
	jnz 2b
	add $16, %rsp
	.cfi_def_cfa_offset 16
	pop %rbp
	.cfi_def_cfa_offset 8
	.cfi_restore %rbp
	ret
end_function signed_factors

// offset_extended
function extended_offset
	push %rbp
	.cfi_def_cfa_offset 16
	.cfi_escape 0x05, 0x06, 0x02
	mov $1, %ebp
	SPIN
	pop %rbp
	.cfi_def_cfa_offset 8
	.cfi_restore %rbp
	ret
end_function extended_offset

function def_cfa
	push %rbp
	.cfi_def_cfa_offset 16
	.cfi_offset %rbp, -16
	sub $48, %rsp
	.cfi_def_cfa %rsp, 64
	mov $1, %ebp
	SPIN
	add $48, %rsp
	.cfi_def_cfa %rsp, 16
	pop %rbp
	.cfi_def_cfa_offset 8
	.cfi_restore %rbp
	ret
end_function def_cfa

// nested remember_state and restore_state
function nested_states
	.cfi_remember_state
	push %rbp
	.cfi_def_cfa_offset 16
	.cfi_offset %rbp, -16
	mov $1, %ebp
	.cfi_remember_state
	sub $24, %rsp
	.cfi_def_cfa_offset 40
	add $24, %rsp
	.cfi_restore_state
	SPIN
	pop %rbp
	.cfi_restore_state
	mov $20000, %ecx
3:	dec %ecx
	jnz 3b
	ret
end_function nested_states

// The call's row begins right before the call, after two short advances.
function advanced
	lea spin_over_rbx(%rip), %rax
	push $0
	.cfi_def_cfa_offset 16
	push $0
	.cfi_def_cfa_offset 24
	call *%rax
	add $16, %rsp
	.cfi_def_cfa_offset 8
	ret
end_function advanced

// Saves its caller's registers, and overwrites them.
function spin_over_rbx
	push %rbx
	.cfi_def_cfa_offset 16
	.cfi_offset %rbx, -16
	push %r12
	.cfi_def_cfa_offset 24
	.cfi_offset %r12, -24
	mov $1, %ebx
	mov $1, %r12d
	SPIN
	pop %r12
	.cfi_def_cfa_offset 16
	.cfi_restore %r12
	pop %rbx
	.cfi_def_cfa_offset 8
	.cfi_restore %rbx
	ret
end_function spin_over_rbx

function restored_rbx
	push %rbx
	.cfi_def_cfa_offset 16
	.cfi_offset %rbx, -16
	pop %rbx
	.cfi_def_cfa_offset 8
	.cfi_restore %rbx
	movq $1, -8(%rsp)
	SPIN
	ret
end_function restored_rbx

// As in _dl_runtime_resolve, the frame is found by a register that a callee has saved.
function cfa_by_a_preserved_register
	push %rbx
	.cfi_def_cfa_offset 16
	.cfi_offset %rbx, -16
	mov %rsp, %rbx
	.cfi_def_cfa_register %rbx
	sub $96, %rsp
	and $-64, %rsp
	call spin_over_rbx
	call restored_rbx
	mov %rbx, %rsp
	.cfi_def_cfa_register %rsp
	pop %rbx
	.cfi_def_cfa_offset 8
	.cfi_restore %rbx
	ret
end_function cfa_by_a_preserved_register

// def_cfa_expression: breg12 16. Its frame is below its callee's, as a frame on another stack may
// be; the callee's frame is in its caller's frame.
function cfa_on_another_stack
	push %r12
	.cfi_def_cfa_offset 16
	.cfi_offset %r12, -16
	mov %rsp, %r12
	.cfi_escape 0x0f, 0x02, 0x7c, 0x10
	lea 32000(%rsp), %rsp
	call spin_over_rbx
	mov %r12, %rsp
	.cfi_def_cfa %rsp, 16
	pop %r12
	.cfi_def_cfa_offset 8
	.cfi_restore %r12
	ret
end_function cfa_on_another_stack

// Functions that are mostly at their first and last instructions, copied to memory without
// tables.
	.globl copied, copied_end
	.p2align 4
copied:
	push %rbp
	mov %rsp, %rbp
	mov $20000, %eax
1:	call 2f
	dec %eax
	jnz 1b
	pop %rbp
	ret
2:	push %rbp
	mov %rsp, %rbp
	call 3f
	pop %rbp
	ret
3:	push %rbp
	mov %rsp, %rbp
	pop %rbp
	ret
copied_end:

// Its callee's return address is the start of the next function; the callee returns for both.
function ends_with_a_call
	sub $8, %rsp
	.cfi_def_cfa_offset 16
	call returns_for_its_caller
end_function ends_with_a_call

function returns_for_its_caller
	SPIN
	add $16, %rsp
	ret
end_function returns_for_its_caller

// Its last instruction enters the kernel; the return address is in no function.
function ends_with_a_system_call
	sub $4104, %rsp
	.cfi_def_cfa_offset 4112
	mov $318, %eax // getrandom(rsp, 4096, 0)
	mov %rsp, %rdi
	mov $4096, %esi
	xor %edx, %edx
	syscall
end_function ends_with_a_system_call
	add $4104, %rsp
	ret

	.section .note.GNU-stack, "", @progbits
