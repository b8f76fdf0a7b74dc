/* Replaces functions imported by the libraries in this process. Overwrites the slots in which the
 * loader has stored the functions' addresses; each library's relocations refer to these slots.
 *
 * Formats: ELF gABI (dynamic section), psABIs for x86-64 and AArch64 (relocations),
 * dl_iterate_phdr(3).
 */
#define _GNU_SOURCE
#include "imports.h"
#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
#define JUMP_SLOT R_X86_64_JUMP_SLOT
#define GLOB_DAT R_X86_64_GLOB_DAT
#elif defined(__aarch64__)
#define JUMP_SLOT R_AARCH64_JUMP_SLOT
#define GLOB_DAT R_AARCH64_GLOB_DAT
#endif

extern const char __ehdr_start __attribute__((visibility("hidden"))); /* this library's ELF header */

struct search {
	const struct import *imports;
	unsigned long long loaded; /* dlpi_adds (libraries ever loaded) at the last search */
	int is_new;
};

static int is_equal(const char *one, const char *other)
{
	while (*one && *one == *other) {
		one++;
		other++;
	}
	return *one == *other;
}

static void *find_replacement(const struct import *import, const char *name)
{
	for (; import->name; import++) {
		if (is_equal(import->name, name))
			return import->function;
	}
	return NULL;
}

/* Writes a word that the loader may have made read-only (RELRO). */
static void write_word(void **word, void *value, const struct dl_phdr_info *object)
{
	uintptr_t size = sysconf(_SC_PAGESIZE), page = (uintptr_t)word & ~(size - 1);
	int is_readonly = 0;

	for (int at = 0; at < object->dlpi_phnum; at++) {
		const ElfW(Phdr) *header = &object->dlpi_phdr[at];
		uintptr_t start = object->dlpi_addr + header->p_vaddr;
		uintptr_t end = start + header->p_memsz;

		/* The loader rounds start and end down: a page in which RELRO ends is writable. */
		if (header->p_type == PT_GNU_RELRO)
			is_readonly = page >= (start & ~(size - 1)) && page < (end & ~(size - 1));
	}
	if (is_readonly && mprotect((void *)page, size, PROT_READ | PROT_WRITE))
		return; /* denied by a security module; calls from this library are not intercepted */
	__atomic_store_n(word, value, __ATOMIC_RELEASE);
	if (is_readonly)
		mprotect((void *)page, size, PROT_READ);
}

/* In a loaded library's dynamic section, glibc stores addresses, but musl leaves offsets. */
static const void *locate(const struct dl_phdr_info *object, uintptr_t address)
{
	return (const void *)(address < object->dlpi_addr ? object->dlpi_addr + address : address);
}

static void replace_in(const struct dl_phdr_info *object, const ElfW(Dyn) *dynamic,
		       const struct import *imports)
{
	const ElfW(Rela) *tables[2] = {NULL, NULL};
	size_t sizes[2] = {0, 0};
	const ElfW(Sym) *symbols = NULL;
	const char *names = NULL;

	for (; dynamic->d_tag != DT_NULL; dynamic++) {
		switch (dynamic->d_tag) {
		case DT_RELA:
			tables[0] = locate(object, dynamic->d_un.d_ptr);
			break;
		case DT_RELASZ:
			sizes[0] = dynamic->d_un.d_val;
			break;
		case DT_JMPREL:
			tables[1] = locate(object, dynamic->d_un.d_ptr);
			break;
		case DT_PLTRELSZ:
			sizes[1] = dynamic->d_un.d_val;
			break;
		case DT_SYMTAB:
			symbols = locate(object, dynamic->d_un.d_ptr);
			break;
		case DT_STRTAB:
			names = locate(object, dynamic->d_un.d_ptr);
			break;
		}
	}
	if (!symbols || !names)
		return;
	for (int at = 0; at < 2; at++) {
		const ElfW(Rela) *end = tables[at] ? tables[at] + sizes[at] / sizeof(*end) : NULL;

		for (const ElfW(Rela) *entry = tables[at]; entry < end; entry++) {
			unsigned int type = ELF64_R_TYPE(entry->r_info);
			void *function, **word = (void **)(object->dlpi_addr + entry->r_offset);

			if (type != JUMP_SLOT && type != GLOB_DAT)
				continue;
			function = find_replacement(
				imports, names + symbols[ELF64_R_SYM(entry->r_info)].st_name);
			if (function && *word != function)
				write_word(word, function, object);
		}
	}
}

static int look_at(struct dl_phdr_info *object, size_t size, void *data)
{
	struct search *search = data;

	if (size < offsetof(struct dl_phdr_info, dlpi_adds) + sizeof(object->dlpi_adds))
		return 1;
	if (!search->is_new && object->dlpi_adds == search->loaded)
		return 1; /* all libraries have been searched */
	search->is_new = 1;
	search->loaded = object->dlpi_adds;
	if (object->dlpi_addr == (uintptr_t)&__ehdr_start)
		return 0;
	for (int at = 0; at < object->dlpi_phnum; at++) {
		const ElfW(Phdr) *header = &object->dlpi_phdr[at];

		if (header->p_type == PT_DYNAMIC)
			replace_in(object, (const void *)(object->dlpi_addr + header->p_vaddr),
				   search->imports);
	}
	return 0;
}

void replace_imports(const struct import *imports)
{
	static struct search search; /* guarded by the GIL */

	search.imports = imports;
	search.is_new = 0;
	dl_iterate_phdr(look_at, &search);
}
