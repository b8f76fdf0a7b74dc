"""Functions that change a valid message so that it violates a rule of the dictionary."""

from __future__ import annotations

from tests.unit.otlp.mutations import SAMPLE, Mutations

MUTATIONS = Mutations(
    [
        ("zero-entries", "dictionary.link_table[0].trace_id", bytes(16)),
        ("zero-entries", "dictionary.mapping_table[0].memory_limit", 5),
        ("zero-entries", "dictionary.location_table[0].address", 5),
        ("zero-entries", "dictionary.function_table[0].start_line", 5),
        ("zero-entries", "dictionary.stack_table[0].location_indices", 1),
        ("zero-entries", "dictionary.attribute_table[0].value.int_value", 0),
        ("index-range", f"{SAMPLE}.link_index", 99),
        ("index-range", f"{SAMPLE}.attribute_indices", 999),
        ("index-range", "dictionary.stack_table[1].location_indices", 999),
        ("index-range", "dictionary.attribute_table[1].unit_strindex", 999),
        ("no-orphans", "dictionary.string_table", "unused"),
        ("attribute-index-unset", f"{SAMPLE}.attribute_indices", 0),
        ("line-numbers", "dictionary.function_table[1].start_line", -1),
        ("line-numbers", "kernel_location.lines[0].line", -1),
        ("line-numbers", "kernel_location.lines[0].column", -1),
        ("link-ids", "dictionary.link_table[1].trace_id", b"t" * 8),
        ("link-ids", "dictionary.link_table[1].span_id", bytes(8)),
    ]
)
breaks, add = MUTATIONS.breaks, MUTATIONS.add
BUILD_ID = "process.executable.build_id"

add("index-range", "stack too high", lambda m: m.sample_stack(999))
add("index-range", "stack negative", lambda m: m.sample_stack(-1))
add("index-range", "function", lambda m: m.kernel_location().lines.add(function_index=999))
add("no-orphans", "stack", lambda m: m.dictionary.stack_table.add(location_indices=[1]))
add("no-orphans", "attribute", lambda m: m.attribute("unused", int_value=5))
add("no-duplicates", "location", lambda m: m.use_location().CopyFrom(m.kernel_location()))
add("attribute-keys-unique", "two thread ids", lambda m: m.label("thread.id", int_value=999))
add("attribute-values", "no value", lambda m: m.label("more"))
add("attribute-values", "reference", lambda m: m.label("more", string_value_strindex=m.string("x")))
add("attribute-values", "no key", lambda m: m.label("", int_value=5))
add("integer-attributes", "thread id as text", lambda m: m.set_text("thread.id", "17"))
add("mapping-identity", "malformed file id", lambda m: m.set_text(f"{BUILD_ID}.htlhash", "AB" * 16))
add("mapping-identity", "malformed build id", lambda m: m.set_text(f"{BUILD_ID}.gnu", "abc"))
add("kernel-mapping-name", "path", lambda m: m.rename("ext4", "/lib/modules/ext4.ko.xz"))
add("kernel-names", "name with offset", lambda m: m.rename("vfs_read", "vfs_read+0x10"))
add("kernel-names", "name with module", lambda m: m.rename("vfs_read", "vfs_read [ext4]"))


@breaks("zero-entries")
def first_string_is_not_empty(m):
    m.dictionary.string_table[0] = "x"


@breaks("zero-entries")
def link_table_is_missing(m):
    for resource_profiles in m.resource_profiles:
        for sample in resource_profiles.scope_profiles[0].profiles[0].samples:
            sample.link_index = 0
    del m.dictionary.link_table[:]


@breaks("index-range")
def mapping_out_of_range(m):
    m.location_where(lambda e: not e.mapping_index).mapping_index = 99


@breaks("index-range")
def name_out_of_range(m):
    table = list(m.dictionary.function_table)[1:]
    next(entry for entry in table if not entry.filename_strindex).filename_strindex = 999


@breaks("index-range")
def resource_value_out_of_range(m):
    item = m.resource_profiles[0].resource.attributes.add(key_strindex=m.string("more"))
    item.value.string_value_strindex = 999


@breaks("no-orphans")
def location_and_function_unused(m):
    m.dictionary.function_table.add(name_strindex=m.string("unused"))
    location = m.dictionary.location_table.add()
    location.CopyFrom(m.kernel_location())
    location.address += 1
    location.lines.add(function_index=len(m.dictionary.function_table) - 1)


@breaks("no-orphans")
def link_unused(m):
    m.dictionary.link_table.add(trace_id=b"t" * 16, span_id=b"s" * 8)


@breaks("no-orphans")
def mapping_unused(m):
    mapping = m.dictionary.mapping_table.add()
    mapping.CopyFrom(m.dictionary.mapping_table[1])
    mapping.memory_limit += 1


@breaks("no-duplicates")
def string_twice(m):
    m.dictionary.string_table.append("thread.name")
    m.attribute_named("thread.name").key_strindex = len(m.dictionary.string_table) - 1


@breaks("no-duplicates")
def link_twice(m):
    m.dictionary.link_table.add().CopyFrom(m.dictionary.link_table[1])
    m.profile().samples[0].link_index = 2


@breaks("no-duplicates")
def function_twice(m):
    table = m.dictionary.function_table
    table.add().CopyFrom(table[1])
    m.kernel_location().lines.add(function_index=len(table) - 1)


@breaks("no-duplicates")
def stack_twice(m):
    table = m.dictionary.stack_table
    table.add().CopyFrom(table[1])
    m.sample_stack(len(table) - 1)


@breaks("no-duplicates")
def attribute_twice(m):
    table = m.dictionary.attribute_table
    location = m.kernel_location()
    table.add().CopyFrom(table[location.attribute_indices[0]])
    m.use_location(
        address=location.address + 1,
        mapping_index=location.mapping_index,
        attribute_indices=[len(table) - 1],
    )


@breaks("no-duplicates")
def mapping_twice_with_attributes_in_another_order(m):
    table = m.dictionary.mapping_table
    location = m.kernel_location()
    copy = table.add()
    copy.CopyFrom(table[location.mapping_index])
    assert len(copy.attribute_indices) > 1
    copy.attribute_indices.reverse()
    m.use_location(
        address=location.address + 1,
        mapping_index=len(table) - 1,
        attribute_indices=location.attribute_indices,
    )


@breaks("attribute-keys-unique")
def two_build_ids(m):
    mapping = m.dictionary.mapping_table[m.kernel_location().mapping_index]
    mapping.attribute_indices.append(m.attribute(f"{BUILD_ID}.gnu", string_value="ee" * 20))


@breaks("units")
def unit_in_words(m):
    index = m.attribute("more", int_value=5)
    m.dictionary.attribute_table[index].unit_strindex = m.string("bytes")
    m.profile().samples[0].attribute_indices.append(index)


@breaks("integer-attributes")
def pid_as_text(m):
    for item in m.resource_profiles[0].resource.attributes:
        if item.key == "process.pid":
            item.value.string_value = "17"


@breaks("function-named")
def function_without_name(m):
    m.dictionary.function_table.add(start_line=5)
    m.kernel_location().lines.add(function_index=len(m.dictionary.function_table) - 1)


@breaks("mapping-identity")
def no_file_id(m):
    m.attribute_named(f"{BUILD_ID}.htlhash").key_strindex = m.string("more")


@breaks("mapping-range")
def range_empty(m):
    mapping = m.dictionary.mapping_table[m.kernel_location().mapping_index]
    mapping.memory_start = mapping.memory_limit


@breaks("location-in-mapping")
def address_at_the_limit(m):
    location = m.kernel_location()
    location.address = m.dictionary.mapping_table[location.mapping_index].memory_limit


@breaks("frame-type")
def frame_type_unknown(m):
    entries = m.dictionary.attribute_table
    next(e for e in entries if e.value.string_value == "native").value.string_value = "assembly"


@breaks("frame-type")
def frame_type_missing(m):
    m.use_location(address=0x7F0000000000)


@breaks("kernel-address")
def unmapped_kernel_address_is_relative(m):
    m.location_where(lambda e: not e.mapping_index and e.address > 1 << 63).address = 0x1234
