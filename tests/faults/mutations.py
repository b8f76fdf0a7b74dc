"""Mutation test: removes handling of one fault at a time, and checks that the fault's test fails.

Run ``python tests/faults/mutations.py [WORD]`` from a checkout. WORD selects the faults whose names
contain it. Only a copy of the checkout is changed. Exits with status 1 if a test still passes
without the error handling that it covers.
"""

# ruff: noqa: E501, T201 - a table with one row per fault; a command prints for its user

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Mutation(NamedTuple):
    """The code to remove, and the test that must fail."""

    fault: str
    path: str
    old: str
    new: str
    test: str


SENDER, RETRY = "otel_kprofiler/export/sender.py", "otel_kprofiler/export/retry.py"
GRPC, HTTP = "otel_kprofiler/export/grpc_status.py", "otel_kprofiler/export/http.py"
CHANNEL, HTTP2 = "otel_kprofiler/export/grpc_channel.py", "otel_kprofiler/export/http2.py"
CALLS = "tests/unit/export/test_grpc_channel.py"
ANSWERS = "otel_kprofiler/export/http_answer.py"
QUEUE, SPOOL = "otel_kprofiler/export/queue.py", "otel_kprofiler/export/spool.py"
EXPORTS = "otel_kprofiler/export/exports.py"
SEGMENTS = "otel_kprofiler/export/segments.py"
RECOVERY = "otel_kprofiler/export/recovery.py"
REPORTING, PIPELINE = "otel_kprofiler/delivery.py", "otel_kprofiler/pipeline/pipeline.py"
WATCHDOG, RUN = "otel_kprofiler/agent/watchdog.py", "otel_kprofiler/cli/run.py"
LOGS, OUTPUTS = "otel_kprofiler/agent/logs.py", "tests/faults/test_outputs.py"
SERVING, PARTS = "otel_kprofiler/serving.py", "tests/unit/test_agent_parts.py"
SOURCES = ("otel_kprofiler/viewing/source_files.py", "tests/unit/viewing/test_source_files.py")
GRPC_VIEW, RECEIVED = (
    "otel_kprofiler/viewing/grpc_receiver.py",
    "tests/unit/viewing/test_receiver.py",
)
CLOCK, AGENT = "otel_kprofiler/clock.py", "otel_kprofiler/agent/agent.py"
WINDOWS, EVENTS = "otel_kprofiler/pipeline/windows.py", "otel_kprofiler/sampling/events.py"
LINKS = "otel_kprofiler/host/links.py"
WRITING, RECORDING = "otel_kprofiler/host/writing.py", "otel_kprofiler/recording/recording.py"
TEXT = "otel_kprofiler/text.py"
PRIVILEGES = "otel_kprofiler/host/privileges.py"
RECEIVERS, DISKS = "tests/faults/test_receivers.py", "tests/faults/test_disks.py"
DURABLE = "tests/unit/export/test_durable_queue.py"
FREEZES = "tests/faults/test_freezes.py"
STORED = "tests/unit/export/test_spool.py"
WRITTEN = "tests/unit/host/test_writing.py"
BUDGET = "otel_kprofiler/symbols/user/budget.py"
STATIC = "otel_kprofiler/symbols/user/static_symbols.py"
JIT_TABLE = "otel_kprofiler/symbols/user/jit_table.py"
READ_FILES = "tests/unit/symbols/user/test_budget.py"
CHILDREN, READ_LINES = (
    "otel_kprofiler/host/child_memory.py",
    "tests/unit/symbols/user/test_lines.py",
)
LINES, INDEXING = "otel_kprofiler/symbols/user/lines.py", "otel_kprofiler/unwinding/indexing.py"
LIMITED, LIMITED_TESTS = (
    "otel_kprofiler/host/limited_children.py",
    "tests/unit/host/test_limited_children.py",
)
PROCESS_BUDGET, BUDGETS = "otel_kprofiler/pipeline/budget.py", "tests/unit/pipeline/test_budget.py"
FAIR, TURNS = "otel_kprofiler/host/fair_queue.py", "tests/unit/host/test_fair_queue.py"
THREAD_CONTEXT = "otel_kprofiler/bpf/programs/thread_context.bpf.h"
V8_CONTEXT = "otel_kprofiler/bpf/programs/v8_context.bpf.h"
CONTEXTS = "otel_kprofiler/processes/thread_contexts.py"
GO_LABELS = "otel_kprofiler/bpf/programs/go_labels.bpf.h"
GOROUTINES = "tests/live/test_goroutine_labels.py"
THREAD_CONTEXTS = "tests/live/test_thread_contexts.py"
RECORD = "otel_kprofiler/thread_record/record.c"
RECORDS = "tests/unit/thread_record/test_thread_record.py::test_the_record_always_matches_the_current_span"

MUTATIONS = [
    Mutation("process to be dumped that holds its own mmap_lock", "otel_kprofiler/host/patient_maps.py", "        if pid in self.locked or not self._calls.call(pid, job):\n", "        job()\n        if pid in self.locked:\n", "tests/live/test_dump.py::test_a_process_stuck_holding_its_mmap_lock_is_dumped"),
    Mutation("process that holds its own mmap_lock at the start", "otel_kprofiler/sampling/unwinder.py", '        if has_ended := calls.call("maps", find_running):\n', "        has_ended = True\n        find_running()\n        if True:\n", "tests/live/test_dump.py::test_a_process_stuck_holding_its_mmap_lock_is_dumped"),
    Mutation("host too busy to list mapped files in time", "otel_kprofiler/sampling/unwinder.py", "_LEAST_LOADING: Final = 0.5\n", "_LEAST_LOADING: Final = 0\n", "tests/live/test_first_stacks.py::test_a_slow_scan_for_mapped_files_leaves_time_to_load_their_tables"),
    Mutation("window above its memory limit", WINDOWS, "        self.end_boot_ns = min(self.end_boot_ns, next_ns)\n        return True\n", "        return False\n", "tests/unit/pipeline/test_pipeline.py::test_a_full_window_closes_before_the_next_sample_and_loses_no_samples"),
    Mutation("file that takes much memory to read", BUDGET, "        if count_bytes > self.left_bytes:\n", "        if count_bytes < 0:\n", f"{READ_FILES}::test_hostile_files_are_read_within_the_memory_limit[symbols]"),
    Mutation("thread that outlives the stop of what it uses", "otel_kprofiler/stopping.py", '    threading.Thread(target=release_later, name="kprofiler-release", daemon=True).start()\n', "", "tests/unit/test_stopping.py::test_resources_are_released_after_the_last_thread_has_exited"),
    Mutation("table of functions that takes much memory", "otel_kprofiler/symbols/user/functions.py", "if self._nbytes >= MIN_MAPPED_BYTES and", "if False and", "tests/unit/symbols/user/test_functions.py::test_most_of_a_large_table_is_not_resident_in_memory"),
    Mutation("table of functions where no file can be written", "otel_kprofiler/symbols/user/columns.py", "    except OSError as error:\n", "    except EOFError as error:\n", "tests/unit/symbols/user/test_functions.py::test_a_large_table_stays_in_memory_without_a_writable_directory"),
    Mutation("thread id that is used again before its waits are read", "otel_kprofiler/sampling/wait_joiner.py", " and pending.begin.time_ns <= thread.ended_ns:", ":", "tests/unit/sampling/test_wait_joiner.py::test_forgetting_a_thread_keeps_the_wait_of_a_later_thread_with_the_same_id"),
    Mutation("child that takes what the cgroup leaves the agent", CHILDREN, "    granted = max(0, left.count_bytes - promised) // _SHARE\n", "    granted = most_bytes\n", "tests/unit/host/test_child_memory.py::test_a_child_is_granted_half_of_the_memory_that_is_not_granted_to_other_children"),
    Mutation("child that takes much memory", LIMITED, "                with limit_memory(child.pid, grant, is_final=not child.serves_files):\n", "                if True:\n", f"{LIMITED_TESTS}::test_a_child_cannot_exceed_its_memory_limit"),
    Mutation("child whose file system does not answer", "otel_kprofiler/host/patient_children.py", "                hangs = wait is not None and wait == last\n", "                hangs = False\n", "tests/unit/host/test_patient_children.py::test_a_child_blocked_by_its_file_system_is_abandoned"),
    Mutation("child that computes, then hangs", "otel_kprofiler/host/patient_children.py", "        child.read_cpu_time()\n", "", "tests/unit/host/test_patient_children.py::test_the_cpu_time_of_an_abandoned_child_is_counted"),
    Mutation("child that takes long to end", "otel_kprofiler/host/patient_children.py", "device if hangs else None", "device", "tests/unit/host/test_patient_children.py::test_a_child_that_is_slow_to_exit_does_not_block_its_device"),
    Mutation("file system that answers again has files without source lines", "otel_kprofiler/symbols/user/loader_files.py", "(self.names is EVICTED or lacks_lines(self.names))", "self.names is EVICTED", "tests/unit/symbols/user/test_loader.py::test_lines_are_read_as_soon_as_their_file_system_responds"),
    Mutation("file system that still does not answer at the second reading", "otel_kprofiler/symbols/user/loader.py", "                if names is EVICTED or lacks_lines(file.names):\n", "                if names is EVICTED:\n", "tests/unit/symbols/user/test_loader.py::test_function_names_are_kept_if_the_lines_of_a_file_cannot_be_read"),
    Mutation("frames of files without source lines are cached", "otel_kprofiler/symbols/user/resolver.py", "        if named.is_interim:\n", "        if False:\n", "tests/unit/symbols/user/test_resolver.py::test_functions_receive_source_lines_once_their_file_system_responds"),
    Mutation("DWARF on a file system that does not answer", LIMITED, "            self._patient.check(device)\n", "", f"{READ_LINES}::test_a_frozen_file_system_does_not_delay_other_files"),
    Mutation("child that the kernel reaps", "otel_kprofiler/host/child_cpu.py", "            except OSError:\n", "            except ZeroDivisionError:\n", "tests/unit/host/test_child_cpu.py::test_the_cpu_time_of_children_reaped_by_the_kernel_counts_as_0"),
    Mutation("child that is killed where the kernel discards its status", LIMITED, "(child.has_status or errors.endswith(DONE))", "True", f"{LIMITED_TESTS}::test_a_child_with_an_unknown_exit_status_succeeds_only_with_an_intact_report"),
    Mutation("converted lines where the kernel discards the status of children", "otel_kprofiler/symbols/user/convert_lines.py", "    os.write(cause, DONE)\n", "", f"{READ_LINES}::test_lines_are_read_even_if_the_kernel_discards_the_childs_status"),
    Mutation("unwind entries where the kernel discards the status of children", "otel_kprofiler/elf/frame_index.py", '    os.write(2, b"\\x04")', "    pass", "tests/unit/unwinding/test_index.py::test_a_table_is_built_even_if_the_kernel_discards_the_childs_status"),
    Mutation("agent whose parent ignores the end of children", "otel_kprofiler/cli/main.py", "        signal.signal(signal.SIGCHLD, signal.SIG_DFL)\n", "        pass\n", "tests/unit/cli/test_version.py::test_commands_restore_sigchld_if_their_parent_ignored_it"),
    Mutation("child that takes much time", LIMITED, "                limit_cpu(child.pid, limits.cpu, child.earlier_cpu_s)\n", "", f"{LIMITED_TESTS}::test_a_childs_cpu_time_limit_depends_on_its_input_size"),
    Mutation("DWARF that takes much time, each time it is needed", LINES, "                self._refused.add(name, reason, may_pass=error.may_pass)\n", "                pass\n", f"{READ_LINES}::test_a_file_with_rejected_dwarf_is_not_converted_again_until_the_file_changes"),
    Mutation("DWARF that was refused on a busy machine", LINES, "may_pass=error.may_pass", "may_pass=False", f"{READ_LINES}::test_dwarf_conversion_is_retried_30_s_after_a_temporary_failure"),
    Mutation("lines that were refused on a busy machine, of a file that stays in use", LINES, "problem, may_pass=may_pass)", "problem)", f"{READ_LINES}::test_symbols_record_whether_their_source_lines_may_become_available_later"),
    Mutation("cache of lines on a full disk, of a file that stays in use", "otel_kprofiler/symbols/user/sources.py", "can_retry_lines=may_pass)", "can_retry_lines=False)", f"{READ_LINES}::test_source_lines_may_still_become_available_after_a_temporary_failure"),
    Mutation("converted lines on a full disk", "otel_kprofiler/symbols/user/convert_lines.py", "os.EX_TEMPFAIL if may_pass else 1", "1", f"{READ_LINES}::test_a_full_disk_is_treated_as_a_temporary_failure"),
    Mutation("unwind entries on a busy machine", INDEXING, "Refusal.FAILED if error.may_pass else Refusal.NOT_INDEXED", "Refusal.NOT_INDEXED", "tests/unit/unwinding/test_index.py::test_an_eh_frame_section_is_indexed_again_after_a_timeout"),
    Mutation("unwind entries that take much time, each time they are needed", INDEXING, "                self._refused.add(key, (error.refusal, error.detail))\n", "                pass\n", "tests/unit/unwinding/test_index.py::test_rejected_eh_frame_sections_are_not_indexed_again_until_they_change"),
    Mutation("table of Go that takes much time, each time it is needed", INDEXING, '    with children.trying_once(fd, ".gopclntab"):\n', "    if True:\n", "tests/unit/unwinding/test_go_frames.py::test_a_malformed_table_is_read_once_and_rejected_with_a_reason"),
    Mutation("file that always takes longer than a busy machine allows", "otel_kprofiler/host/refused_files.py", "self._holds.extend(file) if may_pass", "30.0 if may_pass", "tests/unit/host/test_refused_files.py::test_a_persistent_failure_is_retried_at_growing_intervals"),
    Mutation("unwind table that never fits", "otel_kprofiler/unwinding/store.py", "int(self._holds.extend(key) * 1e9) if reason in COSTLY else _HOLD_NS", "_HOLD_NS", "tests/live/test_unwinding_tables.py::test_loading_a_table_above_the_memory_limit_is_retried_at_growing_intervals"),
    Mutation("lines that never come", "otel_kprofiler/symbols/resolvers/mapped.py", "self._holds.extend(identity)", "30.0", "tests/live/test_process_resolvers.py::test_source_lines_are_read_once_the_file_system_responds_again"),
    Mutation("many files that take much time", "otel_kprofiler/host/refused_files.py", "            if len(self._reasons) > MAX_REFUSED:\n", "            if False:\n", "tests/unit/host/test_refused_files.py::test_the_oldest_rejections_are_evicted"),
    Mutation("code objects of Python with long names", "otel_kprofiler/symbols/python/resolver.py", "            MAX_PLACES_CACHED, self._find, weigh=self._weigh, max_weight=MAX_PLACE_BYTES_CACHED\n", "            MAX_PLACES_CACHED, self._find\n", "tests/unit/symbols/test_python_resolver.py::test_memory_usage_is_bounded_for_any_number_of_code_objects"),
    Mutation("source lines whose names take much memory", "otel_kprofiler/symbols/cache.py", "        if self._left < 0:\n", "        if False:\n", f"{READ_LINES}::test_caching_names_across_files_uses_little_memory"),
    Mutation("converted lines that the disk has no place for", LINES, "            raise LinesError(text, LinesProblem.NOT_KEPT, may_pass=True) from error\n", "            return self._convert(source)\n", f"{READ_LINES}::test_lines_that_cannot_be_cached_are_not_written_to_a_temporary_file"),
    Mutation("split DWARF that makes lookups wait", "otel_kprofiler/symbols/user/names.py", "            may_block=settings.may_block,\n", "", "tests/unit/symbols/user/test_drgn_lines.py::test_the_agent_does_not_wait_for_drgn"),
    Mutation("compressed debug file that takes much memory", STATIC, "self._budget)\n        self._budget.give_back(len(content))\n", "ReadingBudget())\n        self._budget.give_back(len(content))\n", f"{READ_FILES}::test_hostile_files_are_read_within_the_memory_limit[packed-zeros]"),
    Mutation("replaced code with many lines", JIT_TABLE, " or self._former_bytes > MAX_FORMER_BYTES", "", "tests/unit/symbols/user/test_perf_map.py::test_replaced_functions_are_kept_up_to_a_limit"),
    Mutation("receiver down", RETRY, "        failures += 1\n", "        failures += 1\n        return answer, LossCause.REJECTED\n", f"{RECEIVERS}::test_an_unreachable_receiver_is_retried"),
    Mutation("receiver refusing temporarily", GRPC, "        Code.UNAVAILABLE,\n", "", f"{RECEIVERS}::test_no_samples_are_lost_to_transient_grpc_errors"),
    Mutation("receiver refusing permanently", GRPC, "    return Answer(Verdict.REFUSED, code.name, message)\n", "    return Answer(Verdict.RETRY, code.name, message)\n", f"{RECEIVERS}::test_grpc_rejections_are_counted_and_not_retried"),
    Mutation("receiver slow", CHANNEL, "deadline = time.monotonic() + timeout_s", "deadline = time.monotonic() + 30", f"{RECEIVERS}::test_a_slow_receiver_delays_only_its_own_queue"),
    Mutation("receiver hanging mid-response", HTTP, "            self._adapter.abort(exchange)\n\n        # Socket timeouts", "            pass\n\n        # Socket timeouts", "tests/unit/export/test_http_exporter.py"),
    Mutation("receiver sending garbage", ANSWERS, "        return Answer(Verdict.ACCEPTED, name, unreadable=body.problem)\n    kind", "        return Answer(Verdict.REFUSED, name, body.problem)\n    kind", f"{RECEIVERS}::test_a_batch_is_not_exported_again_if_the_response_is_unreadable"),
    Mutation("receiver answering with a page", ANSWERS, "    return Answer(Verdict.ACCEPTED, name, unreadable=problem)\n", "    return Answer(Verdict.REFUSED, name, problem)\n", f"{RECEIVERS}::test_a_batch_is_not_exported_again_if_the_response_is_unreadable"),
    Mutation("receiver hanging up within its success", HTTP, "                if not is_delivered(status):\n                    raise\n", "                raise\n", f"{RECEIVERS}::test_a_batch_is_not_exported_again_if_the_response_is_unreadable"),
    Mutation("many unreadable answers", SENDER, "            self._noted.add(key)\n", "", f"{RECEIVERS}::test_a_batch_is_not_exported_again_if_the_response_is_unreadable"),
    Mutation("endless response", HTTP, '            return Body(b"", f"it exceeds {MAX_RESPONSE_BYTES} bytes")\n', "            pass\n", "tests/unit/export/test_http_exporter.py::test_the_body_of_a_redirect_is_not_read_beyond_the_limit"),
    Mutation("RESOURCE_EXHAUSTED with RetryInfo", GRPC, "delay = parse_retry_delay(status.details) if status.details else None", "delay = None", f"{RECEIVERS}::test_no_samples_are_lost_to_transient_grpc_errors"),
    Mutation("RESOURCE_EXHAUSTED without RetryInfo", GRPC, "(code is Code.RESOURCE_EXHAUSTED and delay is not None)", "code is Code.RESOURCE_EXHAUSTED", f"{RECEIVERS}::test_grpc_rejections_are_counted_and_not_retried"),
    Mutation("429 with Retry-After", ANSWERS, "        return float(value)\n", "        return None\n", f"{RECEIVERS}::test_no_samples_are_lost_to_transient_http_errors"),
    Mutation("Retry-After as a date", ANSWERS, "    return max(0.0, moment - now_unix_s)\n", "    return None\n", "tests/unit/export/test_http_exporter.py"),
    Mutation("partial success", SENDER, "    if answer.rejected_profiles <= 0:\n", "    if True:\n", f"{RECEIVERS}::test_samples_rejected_in_a_partial_success_are_counted"),
    Mutation("4 MiB limit", SENDER, "            if size >= refused:\n", "            if False:\n", f"{RECEIVERS}::test_batches_above_4_mib_are_lost_without_a_retry"),
    Mutation("413 from the receiver", ANSWERS, "    if status == HTTPStatus.REQUEST_ENTITY_TOO_LARGE or _TOO_LARGE.search(message):\n", "    if False:\n", "tests/faults/test_agent_and_receiver.py::test_a_receiver_with_a_small_request_limit_receives_every_sample_once"),
    Mutation("larger than the receiver's gRPC takes", GRPC, "(match := _TOO_LARGE.search(message))", "(match := _TOO_LARGE.match('', 1))", "tests/faults/test_agent_and_receiver.py::test_a_receiver_with_a_small_request_limit_receives_every_sample_once"),
    Mutation("limit of the receiver: remembered", SENDER, "        self.max_bytes = learned.encoded\n", "", "tests/unit/export/test_request_size.py::test_batches_encoded_after_a_rejection_are_within_the_receivers_limit"),
    Mutation("limit of the receiver: later batches are divided at once", SENDER, "aim = limit if learned.takes_nothing else learned.aim", "aim = limit", "tests/unit/export/test_request_size.py::test_later_batches_are_split_up_front_to_the_accepted_size"),
    Mutation("receiver that takes no sample: not flooded", SENDER, "            learned.refuse_all()\n", "            pass\n", "tests/unit/export/test_request_size.py::test_a_receiver_that_accepts_no_sample_gets_one_request_per_batch"),
    Mutation("a receiver refuses all of one batch: later batches are divided", "otel_kprofiler/export/request_size.py", "if not self._has_accepted and not self.takes_nothing:", "if not self.takes_nothing:", "tests/unit/export/test_receivers.py::test_large_requests_are_split_and_oversized_samples_are_saved"),
    Mutation("limit of the receiver: larger requests are tried again", "otel_kprofiler/export/request_size.py", "            self.forget()\n\n    def accept", "            pass\n\n    def accept", "tests/unit/export/test_request_size.py::test_larger_requests_are_tried_again_later"),
    Mutation("account in divided requests", "otel_kprofiler/otlp/split.py", "    spread_accounts(message)\n", "", "tests/unit/otlp/test_split.py"),
    Mutation("divided batch while the receiver is down", QUEUE, "            held = held._replace(samples=samples, batches=tuple(left))\n", "            pass\n", "tests/unit/export/test_request_size.py"),
    Mutation("divided batch left to the next run", QUEUE, "            self._keep_parts()\n", "", "tests/unit/export/test_request_size.py"),
    Mutation("page: a listening socket is no peer", "otel_kprofiler/viewing/peers.py", "if ends == [local, remote] else None", "if ends else None", "tests/unit/viewing/test_peers.py::test_a_listening_socket_is_not_a_peer"),
    Mutation("page: a kernel without tcp_diag", "otel_kprofiler/viewing/peers.py", "    if not has_answered:\n", "    if False:\n", "tests/unit/viewing/test_peers.py"),
    Mutation("kernel suspends the sampler: a warning", "otel_kprofiler/sampling/events.py", "        if warning and warning != self._throttling:\n", "        if False:\n", "tests/unit/host/test_throttling.py::test_each_reduction_in_the_limit_is_reported_once"),
    Mutation("TLS: wrong CA", HTTP, "not tls.insecure_skip_verify and (tls.ca_file or True)", "False", f"{RECEIVERS}::test_data_is_sent_only_over_tls_1_2_or_newer_and_only_to_verified_receivers"),
    Mutation("receiver going away", HTTP2, "                self._last_stream = last & _STREAM_BITS\n", "                pass\n", f"{CALLS}::test_a_receiver_that_goes_away_may_still_respond"),
    Mutation("request that the receiver has not processed", CHANNEL, "            except UnprocessedError:\n                response = self._exchange(headers, body, deadline)\n", "            except ZeroDivisionError:\n                raise\n", f"{CALLS}::test_a_request_that_was_not_processed_is_sent_again_once"),
    Mutation("connection that the receiver has closed", CHANNEL, "self._http2 is None or not self._http2.is_usable(deadline)", "self._http2 is None", f"{CALLS}::test_a_connection_that_the_receiver_closed_while_idle_is_replaced"),
    Mutation("connection without HTTP/2", CHANNEL, "secure.selected_alpn_protocol() != _PROTOCOL", "False", f"{CALLS}::test_a_receiver_that_offers_no_http2_over_tls_is_named"),
    Mutation("name server that does not respond", "otel_kprofiler/export/name_lookup.py", "results.get(timeout=max(0.0, deadline - time.monotonic()))", "results.get(timeout=60)", f"{CALLS}::test_a_hanging_name_server_does_not_extend_a_call"),
    Mutation("name server that does not respond, HTTP", HTTP, "            opened = connect_to((host,), self._deadline, self._watch_step, self._names)\n", "            return super()._find_opener(connection)()\n", "tests/unit/export/test_http_exporter.py::test_the_timeout_bounds_a_name_lookup"),
    Mutation("name server that responds after the time limit", "otel_kprofiler/export/name_lookup.py", "            self._running[key] = results\n", "", f"{CALLS}::test_a_name_server_that_responds_after_the_time_limit_is_of_use"),
    Mutation("receiver that compresses responses", "otel_kprofiler/export/grpc_status.py", "    if not body[0]:\n", "    if True:\n", f"{CALLS}::test_a_compressed_response_is_read"),
    Mutation("child forked from a process with a connection", CHANNEL, "if self._pid != os.getpid():", "if False:", f"{CALLS}::test_a_forked_child_leaves_the_connection_to_its_parent"),
    Mutation("TLS: renewed files over gRPC", "otel_kprofiler/export/grpc.py", "            self._channel.disconnect()\n", "            pass\n", "tests/faults/test_tls.py::test_renewed_tls_files_are_used_once_key_and_certificate_match"),
    Mutation("TLS: renewed files over HTTP", HTTP, "            self._session.close()  # later connections use the new TLS files\n", "            pass\n", "tests/faults/test_tls.py::test_renewed_tls_files_are_used_once_key_and_certificate_match"),
    Mutation("TLS: a file is missing", HTTP, "        except OSError as error:  # a TLS file", "        except ZeroDivisionError as error:  # a TLS file", "tests/faults/test_tls.py::test_export_resumes_once_a_missing_key_file_exists"),
    Mutation("TLS: an answer before the end of the request", "otel_kprofiler/abortable.py", "                except ssl.SSLEOFError as error:\n", "                except ZeroDivisionError as error:\n", "tests/faults/test_tls.py::test_an_early_response_to_an_incomplete_request_is_read"),
    Mutation("TLS: expired client certificate", "otel_kprofiler/export/tls_files.py", "    if now > end:\n", "    if now < end and now > end:\n", "tests/faults/test_tls.py::test_the_log_states_when_the_client_certificate_expired"),
    Mutation("TLS: error without a fix", SENDER, '        return f"{message}: {fix}" if fix else message\n', "        return message\n", "tests/faults/test_tls.py::test_tls_errors_state_the_cause_and_a_fix_but_no_secrets"),
    Mutation("DNS failing", HTTP, "    requests.ConnectionError,\n", "", f"{RECEIVERS}::test_a_failed_dns_lookup_is_retried"),
    Mutation("disk full: memory takes over", QUEUE, '        except OSError as error:\n            self._storage.note_writing(error, "batches', '        except ValueError as error:\n            self._storage.note_writing(error, "batches', f"{DISKS}::test_no_samples_are_lost_on_a_full_disk_while_memory_suffices"),
    Mutation("disk full: partial record", SPOOL, "            os.ftruncate(self._fd, offset)\n", "            pass\n", f"{STORED}::test_a_failed_write_leaves_the_spool_unchanged"),
    Mutation("disk full: settled segments", SPOOL, "            if self._totals.settled < self._last:\n                raise\n", "            raise\n", f"{STORED}::test_settling_a_segments_batches_frees_space_on_a_full_disk"),
    Mutation("spool hung: late append", SPOOL, "                self._disk.confirm()\n", "                pass\n", "tests/unit/export/test_disk_thread.py::test_an_append_that_timed_out_leaves_nothing_in_the_spool"),
    Mutation("spool read-only", SPOOL, "            if error.errno not in _TRANSIENT:\n", "            if True:\n", f"{DISKS}::test_batches_wait_in_memory_if_the_disk_is_read_only"),
    Mutation("spool corrupted: checksum", SEGMENTS, "    if zlib.crc32(memoryview(data)[offset + 4 : start + length]) != crc:\n", "    if False:\n", f"{STORED} {DISKS}::test_a_corrupt_spool_delivers_intact_batches_and_counts_lost_batches"),
    Mutation("spool corrupted: resume reading", SEGMENTS, "            record, budget = _find_next(data, at + 1, segment, budget)\n", "            pass\n", f"{STORED}::test_a_corrupt_byte_invalidates_only_its_record"),
    Mutation("spool corrupted: any offset", SEGMENTS, "_CANDIDATE_AT: Final = 7\n", "_CANDIDATE_AT: Final = 15\n", "tests/property/test_spool.py"),
    Mutation("spool corrupted: intact but invalid", RECOVERY, '            except ValueError as error:\n                self._warn("a record', '            except KeyError as error:\n                self._warn("a record', f"{STORED}::test_intact_but_invalid_records_are_skipped"),
    Mutation("spool corrupted: closed cleanly", RECOVERY, "self._closed = self._closed and end == size", "self._closed = self._closed and not unreadable", f"{STORED}::test_corruption_in_a_cleanly_closed_spool_is_not_reported_as_a_kill"),
    Mutation("spool corrupted: no intact record", RECOVERY, "        self._closed = False\n        for record", "        for record", f"{STORED}::test_an_unreadable_segment_is_treated_as_evidence_of_a_kill"),
    Mutation("spool corrupted: bad blocks", RECOVERY, "if error.errno != errno.EIO:", "if True:", f"{STORED}::test_only_records_in_an_unreadable_block_are_lost"),
    Mutation("spool of another version", SEGMENTS, '    return "" if is_supported else magic', '    return "" if True else magic', f"{STORED}::test_a_segment_in_another_format_version_is_set_aside"),
    Mutation("spool of another version among others", RECOVERY, "        aside = self._count_aside()\n", "        aside = SampleCounts()\n", f"{STORED}::test_samples_in_segments_that_were_set_aside_are_not_counted_as_lost"),
    Mutation("spool with an impossible number", RECOVERY, "            if segment >= MAX_NUMBER:\n", "            if segment < 0:\n", f"{STORED}::test_a_spool_file_whose_number_is_out_of_range_is_ignored"),
    Mutation("spool with a sparse tail", RECOVERY, "        end = _find_end_of_data(fd, min(size, _MAX_READ_BYTES))\n", "        end = min(size, 1 << 28)\n", f"{STORED}::test_the_sparse_tail_of_a_segment_is_not_read"),
    Mutation("switches that the kernel omitted", "otel_kprofiler/sampling/wait_joiner.py", "                    bool(end.flags & WAIT_HAS_BEGUN)\n", "                    True\n", "tests/unit/sampling/test_wait_joiner.py::test_a_wait_end_without_the_has_begun_flag_is_not_joined"),
    Mutation("unstable clock of the scheduler", "otel_kprofiler/sampling/wait_joiner.py", "        asleep = min(asleep, limit)\n", "", "tests/unit/sampling/test_wait_joiner.py::test_an_ongoing_wait_lasts_no_longer_than_the_time_since_its_start"),
    Mutation("many threads that sleep on", "otel_kprofiler/sampling/wait_joiner.py", "            if self._random.random() * threshold_ns >= duration_ns:\n", "            if threshold_ns < 0:\n", "tests/unit/sampling/test_wait_joiner.py::test_samples_of_ongoing_waits_stay_within_the_budget_and_sum_to_the_total"),
    Mutation("request of many tiny messages", "otel_kprofiler/otlp/message_limit.py", "    if count > limit:\n        raise", "    if count < 0:\n        raise", "tests/unit/otlp/test_message_limit.py"),
    Mutation("secret in a wrong place of a configuration", "otel_kprofiler/config/load.py", "    return key if is_shown else hide(key)\n", "    return key\n", "tests/unit/config/test_load.py::test_error_messages_never_reveal_a_misplaced_secret"),
    Mutation("spool removed: segment", SPOOL, "            self._restore_segment()\n", "            pass\n", f"{STORED}::test_a_deleted_current_segment_is_restored_on_append_or_close"),
    Mutation("spool removed: directory", SPOOL, "            self._move()\n", "            pass\n", f"{STORED}::test_a_removed_directory_is_recreated"),
    Mutation("spool replaced by another", SPOOL, "if not same and has_segments(directory):", "if False:", f"{STORED}::test_a_different_spool_at_the_same_path_is_not_touched"),
    Mutation("spool disk mounted late", QUEUE, "        with self._changed:\n            self._adopt_carried()\n", "", f"{DISKS}::test_batches_from_earlier_runs_are_delivered_once_the_disk_is_readable_again"),
    Mutation("segment of another user", WRITING, "or opened.st_uid != os.geteuid():", "or False:", f"{STORED}::test_symlinks_and_segments_owned_by_other_users_are_not_touched"),
    Mutation("segment is a link", WRITING, "_PLAIN: Final = os.O_NOFOLLOW | ", "_PLAIN: Final = ", f"{STORED}::test_symlinks_and_segments_owned_by_other_users_are_not_touched"),
    Mutation("spool corrupted: count", RECOVERY, "        unreadable = totals.appended - totals.done\n", "        unreadable = SampleCounts()\n", f"{STORED} {DISKS}::test_a_corrupt_spool_delivers_intact_batches_and_counts_lost_batches"),
    Mutation("spool corrupted: numbers", RECOVERY, "        self.last = max(self.last, totals.settled)\n", "", f"{STORED}::test_batch_numbers_are_not_reused_after_delivery"),
    Mutation("spool truncated", SPOOL, "        segment = max(self._last, *self._sizes, 0) + 1\n", "        segment = max([*self._sizes, 1])\n", f"{STORED}::test_a_truncated_segment_is_recovered_up_to_its_last_intact_record"),
    Mutation("two writers", "otel_kprofiler/export/recovery.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", f"{STORED}::test_a_second_writer_to_a_spool_is_rejected"),
    Mutation("disk hanging", REPORTING, "                queue.put(batch, rest)\n", "                with self._changed:\n                    queue.put(batch, rest)\n", f"{DISKS}::test_a_hanging_disk_delays_neither_draining_nor_other_exporters"),
    Mutation("SIGKILL: unclean end", RECOVERY, "0 if self._closed else max(totals.end_unix_ns, 1)", "0", f"{STORED} {DURABLE}"),
    Mutation("SIGKILL: position", SPOOL, "                self._write(Kind.MARK, self._totals.pack())\n        except", "                pass\n        except", f"{STORED} {DURABLE}"),
    Mutation("SIGKILL: losses that no request states", SPOOL, "            self._totals.lost += name_losses(kind, losses)\n", "            pass\n", "tests/property/test_delivery.py::test_the_last_run_reports_samples_and_losses_from_all_killed_runs"),
    Mutation("SIGKILL: between two batches of a window", RECOVERY, "            totals.appended += self._rest\n", "            pass\n", f"{STORED}::test_the_undelivered_part_of_a_window_is_counted_once_after_a_kill"),
    Mutation("SIGKILL: losses and samples of earlier runs", QUEUE, "        self._ledgers.begin(spool.earlier, spool.earlier_lost)\n", "", "tests/property/test_delivery.py::test_the_last_run_reports_samples_and_losses_from_all_killed_runs"),
    Mutation("parts of a batch left to the next run", SPOOL, "self._totals.appended - samples if is_part else", "self._totals.appended if is_part else", f"{STORED}::test_samples_in_a_split_batch_are_not_counted_twice"),
    Mutation("batch dropped despite a spool", EXPORTS, "bool(result.lost) and _TEMPORARY.issuperset(result.lost)", "False", f"{DURABLE}"),
    Mutation("spool closed before settling", QUEUE, "not self._in_flight and not self._settling, _INT", "not self._in_flight, _INT", f"{DURABLE}::test_dropped_batches_are_removed_from_the_spool_before_it_is_closed"),
    Mutation("clock stepped back", CLOCK, "        start = max(self._clock.to_unix_ns(start_boot_ns), self._end_unix_ns)\n", "        start = self._clock.to_unix_ns(start_boot_ns)\n", "tests/property/test_clock.py"),
    Mutation("clock stepped: followed", CLOCK, "        self._clock.follow()\n", "", "tests/property/test_clock.py"),
    Mutation("clock not set", CLOCK, "            return EARLIEST_UNIX_NS\n", "            return best_offset\n", "tests/property/test_clock.py tests/unit/test_clock.py"),
    Mutation("suspend", PIPELINE, "                    windows.skip_to(min(passed_ns, earliest_ns))\n", "                    pass\n", "tests/unit/pipeline/test_pipeline.py"),
    Mutation("stalled sampler", "otel_kprofiler/pipeline/gate.py", "        samples_ns = max(samples_ns, now_ns - _MAX_STALL_NS)\n", "", "tests/unit/pipeline/test_pipeline.py"),
    Mutation("stalled loop", WATCHDOG, "            self._missed_checks += 1\n", "", "tests/unit/test_agent_limits.py"),
    Mutation("a foreign file in place of an output", "otel_kprofiler/export/file.py", "        except ExportError as error:\n            # The file was", "        except ZeroDivisionError as error:\n            # Another", "tests/unit/export/test_file_exporter.py::test_samples_count_as_lost_while_another_file_has_the_path"),
    Mutation("foreign signals", RUN, "        signal.signal(number, signal.SIG_IGN)\n", "        pass\n", f"{FREEZES}::test_unrelated_signals_neither_kill_nor_disturb_the_agent"),
    Mutation("unread standard error", LOGS, "            self._lines.append(line)\n", "            write_all(self.fd, line)\n", f"{OUTPUTS}::test_an_unread_standard_error_does_not_block_the_agent"),
    Mutation("unread notification socket", "otel_kprofiler/agent/systemd.py", "socket.SOCK_DGRAM | socket.SOCK_NONBLOCK", "socket.SOCK_DGRAM", f"{OUTPUTS}::test_an_unread_notify_socket_does_not_block_the_agent"),
    Mutation("health: clients holding connections", SERVING, "                    _break_off(waiting)\n", "                    pass\n", f"{PARTS}::test_clients_that_hold_connections_do_not_lock_out_other_clients"),
    Mutation("health: slow client", SERVING, "            for request in [request for request, end in self._open.items() if end < now]:\n", "            for request in ():\n", f"{PARTS}::test_a_client_that_sends_byte_by_byte_is_disconnected"),
    Mutation("view: other users of the host", "otel_kprofiler/viewing/server.py", "if user in self.server.users else", "if True else", "tests/unit/viewing/test_server.py::test_other_users_on_this_host_cannot_read_the_page"),
    Mutation("view: many reset connections", SERVING, "_log.addFilter(RepeatFilter())", "RepeatFilter()", "tests/unit/test_serving.py::test_many_lost_connections_cause_few_log_lines"),
    Mutation("a message of bytes that Python strips as blanks", "otel_kprofiler/otlp/payloads.py", "data.strip(_JSON_SPACE)", "data.strip()", "tests/unit/otlp/test_decode.py::test_unrecognized_data_is_rejected"),
    Mutation("health: reset connection", SERVING, "        if isinstance(error, OSError):\n", "        if False:\n", f"{PARTS}::test_a_reset_connection_causes_one_log_line"),
    Mutation("view: slow clients while an answer is made", SERVING, "if request not in self._answering), None)", "), None)", "tests/unit/test_serving.py::test_requests_in_progress_complete_despite_slow_clients"),
    Mutation("view: clients that stop reading", SERVING, "        return slowest if now - self._answering[slowest] >= _STALLED_S else None\n", "        return None\n", "tests/unit/test_serving.py::test_clients_that_stop_reading_are_disconnected_to_serve_other_clients"),
    Mutation("view: clients that read slowly among others that stop", SERVING, "            self.server.note_progress(self.connection)\n            self.wfile.write(rest[:_PIECE_BYTES])\n", "            self.wfile.write(rest[:_PIECE_BYTES])\n", "tests/unit/test_serving.py::test_clients_that_stop_reading_are_disconnected_to_serve_other_clients"),
    Mutation("view: headers without an end", SERVING, "        if self._left < 0:\n", "        if False:\n", "tests/unit/test_serving.py"),
    Mutation("health: another process has the port at startup", "otel_kprofiler/agent/health.py", "            if not waits or not may_pass:\n", "            if True:\n", f"{PARTS}::test_the_agent_waits_until_its_port_is_free"),
    Mutation("health: the address does not exist yet", "otel_kprofiler/agent/health.py", "(errno.EADDRINUSE, errno.EADDRNOTAVAIL)", "(errno.EADDRINUSE,)", f"{PARTS}::test_the_agent_starts_before_the_address_of_its_endpoint_exists"),
    Mutation("health: DNS rebinding", "otel_kprofiler/agent/health.py", '        if "Host" in self.headers and is_loopback(self.server.host) and not self.is_named():\n', "        if False:\n", "tests/unit/test_serving.py"),
    Mutation("view: calls whose message never comes", GRPC_VIEW, "            context.cancel()\n", "            pass\n", f"{RECEIVED}::test_calls_whose_messages_never_arrive_do_not_block_others"),
    Mutation("view: idle connections of gRPC", GRPC_VIEW, '    ("grpc.max_connection_idle_ms", 10_000),\n', "", f"{RECEIVED}::test_idle_connections_are_closed"),
    Mutation("view: many connections of gRPC", GRPC_VIEW, '    ("grpc.max_allowed_incoming_connections", 256),\n', "", f"{RECEIVED}::test_the_number_of_connections_is_limited"),
    Mutation("view: rapid reset", GRPC_VIEW, '    ("grpc.max_concurrent_streams", 16),\n    # A call that is reset immediately still uses memory until it is handled.\n    ("grpc.server.max_pending_requests", 64),\n    ("grpc.server.max_pending_requests_hard_limit", 128),\n', "", f"{RECEIVED}::test_calls_reset_immediately_by_clients_use_little_memory"),
    Mutation("view: calls above the limit", GRPC_VIEW, "_refuse_busy if is_busy else self._export", "self._export", f"{RECEIVED}::test_calls_above_the_limit_are_answered_with_a_retry_delay"),
    Mutation("view: files that no frame names", "otel_kprofiler/viewing/server.py", "if not path or not self.server.names_file(path):", "if not path:", f"{SOURCES[1]}::test_only_files_named_in_the_profile_are_served"),
    Mutation("view: source files for other hosts", "otel_kprofiler/viewing/server.py", "        if self._user is None:\n", "        if False:\n", f"{SOURCES[1]}::test_no_source_file_is_served_to_other_hosts"),
    Mutation("view: files that are no source", SOURCES[0], "    if not _is_source(path, data):\n", "    if False:\n", f"{SOURCES[1]}::test_only_source_files_are_read"),
    Mutation("view: large source files", SOURCES[0], "    if len(data) > MAX_SOURCE_BYTES:\n", "    if False:\n", f"{SOURCES[1]}::test_only_source_files_are_read"),
    Mutation("view: encodings that are slow", SOURCES[0], "        if encoding not in _QUADRATIC:\n", "        if True:\n", f"{SOURCES[1]}::test_text_is_decoded_and_split_into_lines_as_compilers_do"),
    Mutation("view: files of root for another user", SOURCES[0], "        _become(user)\n", "        pass\n", f"{SOURCES[1]}::test_another_user_can_read_only_permitted_files"),
    Mutation("view: decompression bombs at once", "otel_kprofiler/viewing/receiver.py", "        return partial(_unpack, body, encoding)\n", "        found = _unpack(body, encoding)\n        return lambda: found\n", f"{RECEIVED}::test_a_queued_request_is_not_decompressed"),
    Mutation("view: data behind the end of gzip", "otel_kprofiler/viewing/receiver.py", "    if unpacker.unused_data:\n", "    if False:\n", f"{RECEIVED}::test_data_after_the_end_of_a_gzip_stream_is_rejected_instead_of_ignored"),
    Mutation("view: memory in pieces", "otel_kprofiler/cli/view_sources.py", "            give_back_memory()\n", "            pass\n", "tests/unit/viewing/test_view_command.py::test_memory_used_by_hostile_requests_is_released"),
    Mutation("stop with a backlog", PIPELINE, "time.monotonic() > self._deadline_s", "False", "tests/unit/pipeline/test_pipeline.py"),
    Mutation("stop with a backlog: counted", PIPELINE, "            self._in_windows += given_up\n", "            pass\n", "tests/unit/pipeline/test_pipeline.py"),
    Mutation("stop during encoding", REPORTING, "                self._lose(self._encoding, LossCause.SHUTDOWN)  # too late to send\n                self._encoding = None\n", "                pass\n", "tests/unit/test_delivery.py"),
    Mutation("windows waiting for encoding", REPORTING, "samples > MAX_WAITING_SAMPLES", "False", "tests/unit/test_delivery.py"),
    Mutation("aborted step: samples in hand", PIPELINE, "                self._gate.push(samples)\n        return", "                pass\n        return", "tests/unit/pipeline/test_pipeline.py"),
    Mutation("CPU hotplug", "otel_kprofiler/host/event_per_cpu.py", "for cpu in sorted(online - self._events.keys()):", "for cpu in ():", "tests/live/test_sampler.py"),
    Mutation("no counters of the processor", "otel_kprofiler/host/event_specs.py", "    if not _has_counters(files):", "    if False:", "tests/unit/host/test_event_specs.py"),
    Mutation("events fill the ring", "otel_kprofiler/bpf/programs/sampler.bpf.c", "RING_USED(ring) >= options->wakeup_bytes / 2 * 3", "0", "tests/live/test_events.py::test_samples_that_do_not_fit_into_the_ring_buffer_are_counted"),
    Mutation("tracepoints inside programs", "otel_kprofiler/bpf/programs/sampler.bpf.c", "	if (*(volatile u64 *)&own->is_taken)\n", "	if (0)\n", "tests/live/test_tracepoints.py::test_bpf_programs_that_interrupt_each_other_write_intact_records"),
    Mutation("descriptors exhausted", EVENTS, "            changes = self.update()\n        except OSError as error:", "            changes = self.update()\n        except ValueError as error:", "tests/faults/test_hosts.py::test_sampling_continues_when_file_descriptors_are_exhausted"),
    Mutation("unreadable /proc entry", "otel_kprofiler/processes/reader.py", "        except OSError:\n            return {}  # a kernel thread", "        except ValueError:\n            return {}  # a kernel thread", "tests/faults/test_hosts.py"),
    Mutation("second SIGTERM", AGENT, "            raise SystemExit(128 + number)\n", "            return\n", "tests/faults/test_agent_and_receiver.py::test_a_second_sigterm_stops_the_agent_at_once_keeping_the_spool"),
    Mutation("CPU limit", AGENT, "            self._stay_within_limits(now)\n", "            pass\n", "tests/faults/test_limits.py"),
    Mutation("capabilities of threads", PRIVILEGES, "        keep_only(() if self._drop_all else job)\n", "", "tests/live/test_privileges.py"),
    Mutation("capabilities of the sampling thread", PRIVILEGES, "        keep_only(() if self._drop_all else SAMPLING)\n", "", "tests/live/test_privileges.py"),
    Mutation("samples not offered: reported", REPORTING, "    lost += Counter({LossCause.NOT_OFFERED: account.not_offered})\n", "", "tests/unit/test_delivery.py"),
    Mutation("losses after the last window: reported", QUEUE, "            self._append(final)\n", "            pass\n", "tests/unit/test_delivery.py"),
    Mutation("losses at shutdown with a spool: reported", QUEUE, "                self._store(final)\n", "                pass\n", f"{DISKS}::test_the_next_run_reports_batches_lost_at_shutdown_after_the_disk_was_full"),
    Mutation("losses in the stream's totals", REPORTING, "        lost=dict(lost),\n        earlier", "        lost=totals.lost,\n        earlier", "tests/unit/test_delivery.py"),
    Mutation("module in the working directory: reload", "otel_kprofiler/config/load_in_child.py", '[sys.executable, "-I", "-c"', '[sys.executable, "-c"', "tests/unit/test_hostile_directory.py"),
    Mutation("module in the working directory: -m", "otel_kprofiler/__main__.py", "    del sys.path[0]\n", "    pass\n", "tests/unit/test_hostile_directory.py"),
    Mutation("context claiming another host", "otel_kprofiler/processes/contexts.py", "        if not key.startswith(RESERVED):\n", "        if True:\n", "tests/unit/sdk/test_process_context.py"),
    Mutation("service counted twice", PIPELINE, "        if self.options.leaves_out_self_profiled:\n", "        if False:\n", "tests/live/test_self_profiled.py"),
    Mutation("process hiding from the agent", "otel_kprofiler/processes/self_profiled.py", " == _BPF_MAP:", " != '':", "tests/unit/processes/test_self_profiled.py"),
    Mutation("two profiles with equal labels", "otel_kprofiler/processes/grain.py", "merged.setdefault(key, Resource(selected, resource.schema_url))", "Resource(selected, resource.schema_url)", "tests/unit/processes/test_grain.py"),
    Mutation("unbounded contexts", "otel_kprofiler/processes/contexts.py", " or self._known_bytes > _MAX_KNOWN_BYTES", "", "tests/unit/sdk/test_process_context.py"),
    Mutation("output path is a link", LINKS, "        if not is_trusted(there, link) and (is_root or _is_protected(there, link)):\n            return path\n", "", f"{WRITTEN}::test_another_users_symlink_is_neither_followed_nor_replaced"),
    Mutation("output path replaced by a link", WRITING, "os.O_RDWR | os.O_CREAT | os.O_EXCL | _PLAIN", "os.O_RDWR | os.O_CREAT", f"{WRITTEN}::test_the_temporary_name_of_an_unfinished_file_is_unpredictable"),
    Mutation("appended file is a link", WRITING, "_PLAIN: Final = os.O_NOFOLLOW | ", "_PLAIN: Final = ", f"{WRITTEN}::test_other_users_links_are_not_followed_when_appending"),
    Mutation("appended file has a second name", WRITING, "        if opened.st_nlink > 1:\n", "        if False:\n", f"{WRITTEN}::test_other_users_links_are_not_followed_when_appending"),
    Mutation("appended file of another user", WRITING, "        if opened.st_uid not in (0, os.geteuid()):\n", "        if False:\n", f"{WRITTEN}::test_other_users_links_are_not_followed_when_appending"),
    Mutation("private directory of another user", WRITING, "        if here.st_uid != os.geteuid():\n", "        if False:\n", f"{WRITTEN}::test_a_directory_writable_by_others_is_not_accepted_as_private"),
    Mutation("private directory writable by others", WRITING, "        elif here.st_mode & (stat.S_IWGRP | stat.S_IWOTH):\n", "        elif False:\n", f"{WRITTEN}::test_a_directory_writable_by_others_is_not_accepted_as_private"),
    Mutation("raw recording readable by others", RECORDING, "mode=0o600", "mode=0o644", "tests/unit/recording/test_recording.py"),
    Mutation("control characters in names: pprof", "otel_kprofiler/formats/pprof.py", "escape_surrogates(text).encode()", "ascii(text).encode()", "tests/unit/formats/test_python.py"),
    Mutation("control characters in names: speedscope", "otel_kprofiler/formats/speedscope.py", '{"name": escape_surrogates(frame.label)}', '{"name": ascii(frame.label)}', "tests/unit/formats/test_python.py"),
    Mutation("terminal escapes: log", LOGS, "return escape_controls(super().formatMessage(record))", "return super().formatMessage(record)", "tests/property/test_hostile_names.py"),
    Mutation("terminal escapes: tracebacks in the log", LOGS, 'map(escape_controls, super().formatException(ei).split("\\n"))', 'super().formatException(ei).split("\\n")', "tests/property/test_hostile_names.py"),
    Mutation("names that are not UTF-8: filters", "otel_kprofiler/analysis/filters.py", "escape_surrogates(value) if isinstance(value, str) else value", "value", "tests/unit/clickhouse/test_reading.py"),
    Mutation("names that are not UTF-8: addresses", "otel_kprofiler/clickhouse/address.py", '        unquote(text, errors="strict")\n', "", "tests/unit/clickhouse/test_address.py"),
    Mutation("filters of SQL: quotes", "otel_kprofiler/clickhouse/conditions.py", '"\'": r"\\\'", ', "", "tests/unit/clickhouse/test_reading.py"),
    Mutation("filters of SQL: backslashes", "otel_kprofiler/clickhouse/conditions.py", '_ESCAPES: Final = str.maketrans({"\\\\": r"\\\\", "\'"', '_ESCAPES: Final = str.maketrans({"\'"', "tests/unit/clickhouse/test_reading.py"),
    Mutation("names that are not UTF-8: reports", TEXT, '        return "".join(_escape(char) if', '        return text or "".join(_escape(char) if', "tests/unit/formats/test_formats.py"),
    Mutation("names that are not UTF-8: OTLP", TEXT, '        return "".join(_escape(char) if', '        return text or "".join(_escape(char) if', "tests/unit/otlp/test_encode.py"),
    Mutation("terminal escapes: commands", "otel_kprofiler/cli/terminal.py", 'map(escape_controls, text.split("\\n"))', 'text.split("\\n")', "tests/unit/test_terminal.py"),
    Mutation("terminal escapes: tables", "otel_kprofiler/formats/table.py", "cut(escape_controls(text), width)", "cut(text, width)", "tests/unit/formats/test_text.py"),
    Mutation("terminal escapes: folded", "otel_kprofiler/formats/folded.py", "return escape_controls(", "return str(", "tests/unit/formats/test_text.py"),
    Mutation("turns of one process that cost more than others'", FAIR, "            self._costs[group][turn.owner] += cpu_ns + children_ns\n", "", f"{TURNS}::test_an_owner_of_costly_work_receives_fewer_turns"),
    Mutation("one process uses up the CPU time of all", FAIR, "        if new:\n", "        if False:\n", f"{TURNS}::test_costly_work_for_one_owner_does_not_delay_other_owners"),
    Mutation("one reserve for many processes", FAIR, "CpuShare(share * RESERVE)", "CpuShare(1.0)", f"{TURNS}::test_total_work_stays_within_the_cpu_share_after_an_initial_burst"),
    Mutation("requests that are too large again and again", "otel_kprofiler/otlp/split.py", "_FIRST_TIME + count // 2", "1", "tests/unit/otlp/test_split.py::test_profiles_in_batches_that_are_split_repeatedly_have_distinct_ids"),
    Mutation("a storm of processes takes all turns", FAIR, "return self._group_costs[group], self._costs[group][owner]", "return 0, self._costs[group][owner]", f"{TURNS}::test_many_owners_in_a_group_do_not_delay_another_group"),
    Mutation("a storm of processes fills the queue of files with symbols", "otel_kprofiler/symbols/user/loader.py", "FairQueue(cpu_share, now_ns, find_user)", "FairQueue(cpu_share, now_ns)", "tests/unit/symbols/user/test_loader.py::test_a_flood_of_files_does_not_crowd_out_other_processes"),
    Mutation("a disk hangs that has a file of a running program", "otel_kprofiler/unwinding/store.py", "left_s = until_s - time.monotonic()", "left_s = None", "tests/live/test_unwinding_tables.py::test_the_wait_for_preloaded_tables_has_a_time_limit"),
    Mutation("tables of running programs exceed the memory", "otel_kprofiler/unwinding/store.py", "evicts=key not in self._early", "evicts=True", "tests/live/test_unwinding_tables.py::test_tables_are_preloaded_up_to_the_memory_limit"),
    Mutation("one process asks for many files to be opened", "otel_kprofiler/unwinding/requests.py", "self._unopened.put(request.tgid, request)", "self._unopened.put(0, request)", "tests/unit/unwinding/test_requests.py::test_requests_to_open_files_alternate_between_processes"),
    Mutation("one process asks for many tables to be loaded", "otel_kprofiler/unwinding/requests.py", "self._opened.put(opened.request.tgid, opened)", "self._opened.put(0, opened)", "tests/unit/unwinding/test_requests.py::test_unwind_tables_are_loaded_for_processes_in_turn"),
    Mutation("the running programs are many of Go", "otel_kprofiler/unwinding/store.py", "self._builds.charge(0 if self._is_preloading else cpu_ns)", "self._builds.charge(cpu_ns)", "tests/live/test_unwinding_tables.py::test_building_tables_for_preloading_does_not_use_up_the_cpu_budget"),
    Mutation("tables of many running programs have to be made", "otel_kprofiler/unwinding/store.py", "(len(self._builds) if most else 0)", "0", "tests/live/test_unwinding_tables.py::test_files_with_tables_are_preloaded_while_tables_for_other_files_are_built"),
    Mutation("one process asks for many tables to be made", "otel_kprofiler/unwinding/build_queue.py", "self._waiting.put(request.tgid, request)", "self._waiting.put(0, request)", "tests/live/test_unwinding_tables.py::test_unwind_tables_are_built_round_robin_by_process"),
    Mutation("a frozen file system, at the stop", "otel_kprofiler/agent/agent.py", "with stop_within(min(DEFAULT_S, self._time_left_s(_CLOSED_SHARE))):", "with stop_within(60):", "tests/faults/test_frozen_files.py::test_a_frozen_file_system_does_not_delay_shutdown"),
    Mutation("frozen file systems, while others are read", "otel_kprofiler/host/patient_calls.py", "            if is_over and self._leave(hanging, reader, done):\n", "            if False:\n", "tests/faults/test_frozen_files.py::test_frozen_file_systems_do_not_delay_other_symbols"),
    Mutation("a frozen file system, more of its files", "otel_kprofiler/host/patient_calls.py", "            if device in self._left:\n                self._left[device].jobs.append(job)\n                return False\n", "", "tests/unit/host/test_patient_calls.py::test_an_unresponsive_device_does_not_delay_calls_on_other_devices"),
    Mutation("a slow device", "otel_kprofiler/host/patient_calls.py", "(wait is not None and wait == last)", "wait is not None", "tests/unit/host/test_patient_calls.py::test_a_call_that_progresses_slowly_is_not_abandoned"),
    Mutation("a frozen file that is being read within the budget", "otel_kprofiler/symbols/user/budget.py", "            if self._reader == thread:\n", "            if False:\n", "tests/unit/symbols/user/test_budget.py::test_an_abandoned_reader_does_not_block_other_readers_but_its_memory_is_still_counted"),
    Mutation("tables that do not fit together", "otel_kprofiler/symbols/user/loader.py", "        if self._now_ns() < entry.file.again_ns:\n            return\n", "", "tests/unit/symbols/user/test_loader.py::test_tables_that_evict_each_other_are_reloaded_at_growing_intervals"),
    Mutation("evicted symbols of a container's file", "otel_kprofiler/symbols/user/reopening.py", "    for pid in _list_processes(wanted.owner, files):\n", "    for pid in ():\n", "tests/live/test_reopened_files.py::test_container_files_without_build_ids_are_resolved_again_after_eviction"),
    Mutation("evicted symbols, and another file in its place", "otel_kprofiler/symbols/user/reopening.py", "is_equal = hash_file(source) == details.file_id", "is_equal = True", "tests/live/test_reopened_files.py::test_a_changed_file_is_not_reopened"),
    Mutation("a file without symbols starts again", "otel_kprofiler/symbols/user/loader.py", "                if names is EVICTED or lacks_lines(file.names):\n", "                if lacks_lines(file.names):\n", "tests/unit/symbols/user/test_loader.py::test_a_missing_file_is_read_as_soon_as_it_can_be_opened"),
    Mutation("the queue of files with symbols is full for a while", "otel_kprofiler/symbols/user/loader.py", "dropped.file.postpone(self._now_ns())", "dropped.file.names = _DROPPED", "tests/unit/symbols/user/test_loader.py::test_a_file_dropped_by_a_full_queue_is_read_once_the_queue_has_space"),
    Mutation("a frozen file system, named", "otel_kprofiler/stopping.py", "        if stop.unread:\n", "        if False:\n", "tests/faults/test_frozen_files.py::test_a_frozen_file_system_does_not_delay_shutdown"),
    Mutation("threads at work, not blamed on the file system", "otel_kprofiler/stopping.py", "            if path := _read.get(thread.ident or 0):\n", '            if path := _read.get(thread.ident or 0, "a file"):\n', "tests/unit/test_stopping.py::test_the_file_system_is_reported_only_for_threads_reading_a_file"),
    Mutation("files that shrink while they are read", "otel_kprofiler/elf/source.py", "        if len(data) != size:\n", "        if False:\n", "tests/fuzz/test_changing_files.py"),
    Mutation("a debug file in a container", "otel_kprofiler/symbols/user/loader_files.py", 'f"/proc/{owner}/root" if owner else ""', '""', "tests/live/test_container_symbols.py::test_programs_are_symbolized_from_debug_files_in_their_container"),
    Mutation("links out of a container", "otel_kprofiler/host/mapped_files.py", "files.open_reference_in(root, path) if root", "files.open_reference(root + path) if root", "tests/live/test_container_symbols.py::test_symlinks_cannot_escape_the_container"),
    Mutation("a debug file in a directory that hangs", "otel_kprofiler/symbols/user/loader.py", "lambda: searched or device", "lambda: device", "tests/live/test_container_symbols.py::test_exported_names_are_used_while_the_search_for_a_debug_file_hangs"),
    Mutation("memory of a process that hangs", "otel_kprofiler/processes/contexts.py", "self._calls.call(key, partial(self._renew, key))", "self._renew(key)", "tests/unit/sdk/test_process_context.py::test_contexts_are_read_while_a_read_of_another_process_hangs"),
    Mutation("search for thread contexts under cpu.max", "otel_kprofiler/processes/search_time.py", "        self._until_s += delay_s - self._delay_s\n", "", "tests/unit/processes/test_search_time.py::test_the_time_limit_of_a_search_does_not_include_waiting_for_a_cpu"),
    Mutation("many processes whose memory hangs", "otel_kprofiler/processes/hanging_processes.py", " or len(users) >= MAX_LEFT or", " or", "tests/unit/processes/test_hanging_processes.py::test_hanging_processes_block_neither_callers_nor_reads_for_other_users"),
    Mutation("many processes of a user whose memory hangs", "otel_kprofiler/processes/hanging_processes.py", " or users.count(user) >= MAX_OF_USER:", ":", "tests/unit/processes/test_hanging_processes.py::test_hanging_processes_block_neither_callers_nor_reads_for_other_users"),
    Mutation("end of a process whose memory hangs", "otel_kprofiler/processes/contexts.py", " and self._has_ended(key):\n", " and False:\n", "tests/unit/sdk/test_process_context.py::test_contexts_are_read_while_a_read_of_another_process_hangs"),
    Mutation("stacks that stay the same while a file is evicted", "otel_kprofiler/symbols/user/loader_files.py", ", is_interim=True)", ")", "tests/unit/symbols/user/test_resolver.py::test_frames_in_an_evicted_file_are_named_after_the_file_is_read_again"),
    Mutation("file that cannot be read, tried again and again", "otel_kprofiler/symbols/user/loader_files.py", "        is_first = failure not in self._failures\n", "        is_first = True\n", "tests/unit/symbols/user/test_loader.py::test_a_file_that_fails_repeatedly_is_counted_only_once"),
    Mutation("file system that answers again, for resolvers", "otel_kprofiler/symbols/resolvers/mapped.py", "self._again_s.get(place.identity, math.inf)", "math.inf", "tests/live/test_process_resolvers.py::test_source_lines_are_read_once_the_file_system_responds_again"),
    Mutation("shared DWARF that hangs", "otel_kprofiler/symbols/user/debug_files.py", " or not search.begin()", "", "tests/live/test_container_symbols.py::test_names_from_other_files_are_found_while_a_shared_dwarf_file_hangs"),
    Mutation("one process has many files whose DWARF takes long", "otel_kprofiler/symbols/user/loader.py", "done(turn, cpu_ns, children_ns)", "done(turn, cpu_ns)", "tests/unit/symbols/user/test_loader.py::test_files_for_other_processes_are_read_before_those_for_a_slow_process"),
    Mutation("child that is ended at its limit", "otel_kprofiler/host/patient_children.py", "            charge_child(child)\n", "", "tests/unit/host/test_patient_children.py::test_cpu_time_of_children_is_charged_to_the_waiting_thread"),
    Mutation("one process has many files with symbols", "otel_kprofiler/symbols/user/loader.py", "self._waiting.put(waiting.wanted.owner, ", "self._waiting.put(0, ", "tests/unit/symbols/user/test_loader.py::test_files_for_different_processes_are_read_alternately"),
    Mutation("files with large tables, one after the other", "otel_kprofiler/symbols/user/loader.py", "        self._budget.make_space = self._make_space\n", "        pass\n", "tests/unit/symbols/user/test_loader.py::test_reading_files_evicts_large_tables_but_not_small_tables"),
    Mutation("programs of Go with many functions, and lines", "otel_kprofiler/symbols/user/file.py", " + (self._lines.nbytes if self._lines else 0)", "", f"{READ_FILES}::test_go_line_tables_are_read_within_the_memory_limit"),
    Mutation("one process fills the queue of files with symbols", FAIR, "(sizes[groups[key]], len(self._waiting[key]))", "(0, -len(self._waiting[key]))", "tests/unit/symbols/user/test_loader.py::test_a_flood_of_files_does_not_crowd_out_other_processes"),
    Mutation("a process makes new stacks all the time", PROCESS_BUDGET, "sample = _without_user_frames(sample)\n", "pass\n", f"{BUDGETS}::test_new_stacks_from_a_noisy_process_are_reduced_to_kernel_frames"),
    Mutation("a process executes programs all the time", PROCESS_BUDGET, 'if _is_spent(shares, began_ns):\n            self.coarse["resource"]', 'if False:\n            self.coarse["resource"]', f"{BUDGETS}::test_a_process_that_execs_constantly_keeps_the_same_resource"),
    Mutation("a process renames itself all the time", WINDOWS, "not self._budgets.admit(sample, resource)", "False", f"{BUDGETS}::test_a_process_that_renames_itself_is_named_after_its_executable"),
    Mutation("a process renames itself all the time, in batches", WINDOWS, "budgets and not budgets.admits(first, resource)", "False", f"{BUDGETS}::test_a_process_that_renames_itself_is_named_after_its_executable"),
    Mutation("resolving is not charged", PROCESS_BUDGET, "stack = self._stacks.resolve(sample)\n        _spend(shares, self._now_ns() - began_ns)\n", "stack = self._stacks.resolve(sample)\n", f"{BUDGETS}::test_the_long_term_cost_of_a_process_is_limited_to_its_budget"),
    Mutation("the budget of one process is that of all", PROCESS_BUDGET, "share = self._shares.get(sample.tgid)", "share = self._shares.get(0)", f"{BUDGETS}::test_new_stacks_from_a_noisy_process_are_reduced_to_kernel_frames"),
    Mutation("a thread publishes large attributes that differ all the time", PROCESS_BUDGET, "max(GROUP_NS, CONTEXT_BYTE_NS * len(sample.context))", "GROUP_NS", f"{BUDGETS}::test_thread_context_attributes_are_charged_to_the_budget_by_size"),
    Mutation("a storm of processes, each with a budget", PROCESS_BUDGET, "return share, group\n", "return share, share\n", f"{BUDGETS}::test_short_lived_processes_share_a_budget"),
    Mutation("a storm of processes takes the budget of services", PROCESS_BUDGET, "sample.cgroup_id, is_young", "sample.cgroup_id, True", f"{BUDGETS}::test_short_lived_processes_do_not_consume_the_budgets_of_other_processes"),
    Mutation("a storm of processes in a container that starts", "otel_kprofiler/processes/resources.py", "renewed | self._shared.renew(resources)", "renewed", "tests/unit/processes/test_resources.py::test_a_shared_resource_is_renewed_when_its_container_and_names_become_known"),
    Mutation("a process whose budget suffices again within a sample", PROCESS_BUDGET, "is_shared = resource.attributes.get(COARSE) is True", "is_shared = False", f"{BUDGETS}::test_samples_attributed_to_a_shared_resource_have_no_thread_id_or_name"),
    Mutation("a thread context that is not valid", THREAD_CONTEXT, "	if (head->valid != IS_VALID)\n", "	if (0)\n", f"{THREAD_CONTEXTS}::test_pointers_that_do_not_lead_to_a_context_yield_no_span"),
    Mutation("attributes of a thread context above the limit", THREAD_CONTEXT, "	if (bytes > MAX_CONTEXT_ATTRIBUTES)\n		bytes = MAX_CONTEXT_ATTRIBUTES;\n", "", f"{THREAD_CONTEXTS}::test_attributes_are_truncated_if_they_are_too_long_or_unmapped"),
    Mutation("attributes of a thread context that are not there", THREAD_CONTEXT, "		bytes = 0; /*", "		return 0; /*", f"{THREAD_CONTEXTS}::test_attributes_are_truncated_if_they_are_too_long_or_unmapped"),
    Mutation("a thread context that another thread changes", THREAD_CONTEXT, " || !is_same_head(head, &again))\n", ")\n", f"{THREAD_CONTEXTS}::test_a_record_being_changed_by_another_thread_yields_no_span"),
    Mutation("a vector that is too long to be read at once", THREAD_CONTEXT, "	if (bytes <= DTV_BYTES) {\n", "	if (1) {\n", f"{THREAD_CONTEXTS}::test_samples_are_linked_to_the_current_span_of_the_sampled_thread[gcc-opened_behind_others]"),
    Mutation("labels of a goroutine above the limit", GO_LABELS, "	if (at + 2 + key + value > MAX_CONTEXT_ATTRIBUTES)\n		return 0;\n", "", f"{GOROUTINES}::test_hostile_labels_are_limited_in_size_and_yield_no_link[many]"),
    Mutation("a value of a goroutine's label that is too long", GO_LABELS, "		value = GO_MAX_VALUE;\n", "		return 0;\n", f"{GOROUTINES}::test_hostile_labels_are_limited_in_size_and_yield_no_link[long]"),
    Mutation("a version of Go that is not supported", "otel_kprofiler/processes/goroutines.py", 'patch[0] == "." and patch[1:].isdigit()', "True", "tests/unit/processes/test_goroutines.py::test_the_error_for_an_unsupported_go_version_names_the_version"),
    Mutation("a Go program with other thread-local variables", "otel_kprofiler/processes/goroutines.py", "elf.storage.size != _POINTER_BYTES", "False", "tests/unit/processes/test_goroutines.py::test_programs_with_additional_thread_local_variables_are_rejected"),
    Mutation("a process that no longer announces contexts", CONTEXTS, "        if place is None:\n            self.release(key)\n", "        if place is None:\n            return\n", "tests/unit/processes/test_thread_pointer.py::test_a_process_that_stops_announcing_contexts_is_unregistered"),
    Mutation("processes of other users whose contexts may not be read", "otel_kprofiler/processes/contexts.py", "            self.unread.deny(key)\n", "", "tests/live/test_context_rights.py::test_processes_with_unreadable_spans_are_counted_by_reason"),
    Mutation("a map of V8 whose buckets are no power of two", V8_CONTEXT, " || buckets & (buckets - 1) ||", " ||", f"{THREAD_CONTEXTS}::test_v8_heap_objects_that_are_not_contexts_yield_no_span[odd]"),
    Mutation("a storage of Node.js without a context", V8_CONTEXT, "room->entry.value == room->writer.undefined ||", "", f"{THREAD_CONTEXTS}::test_v8_heap_objects_that_are_not_contexts_yield_no_span[undefined]"),
    Mutation("the layout of V8 is not kept for the next search", "otel_kprofiler/processes/contexts.py", "for name in ANNOUNCED if", "for name in ANNOUNCED[:2] if", "tests/live/test_context_writers.py::test_samples_carry_the_span_published_by_pprof_for_nodejs[pprof-wrapped]"),
    Mutation("another layout of V8", CONTEXTS, "extra.get(name, values[0]) not in values", "False", "tests/unit/processes/test_thread_contexts.py::test_contexts_are_not_read_if_the_v8_layout_is_unsupported"),
    Mutation("less memory behind a thread context than is read with it", THREAD_CONTEXT, "		if (READ_USER(*head, at))\n", "		if (1)\n", f"{THREAD_CONTEXTS}::test_attributes_are_truncated_if_they_are_too_long_or_unmapped"),
    Mutation("a process that shares its word of bits with one that is released", "otel_kprofiler/bpf/thread_contexts.py", "for key in self._registered if", "for key in (tgid,) if", f"{THREAD_CONTEXTS}::test_releasing_a_process_does_not_affect_spans_of_adjacent_pids"),
    Mutation("a cut-off attribute of a thread context", CONTEXTS, "        if end > len(context):\n            break\n", "", "tests/unit/processes/test_thread_contexts.py::test_a_truncated_attribute_ends_parsing"),
    Mutation("more attributes of a thread context than labels", CONTEXTS, "if name and (name == LOCAL_ROOT or name in labels or len(labels) < MAX_LABELS):", "if name:", "tests/unit/processes/test_thread_contexts.py::test_attributes_have_the_same_limits_as_labels"),
    Mutation("names of attributes that samples have themselves", CONTEXTS, 'return "" if is_ours or', 'return "" if', "tests/unit/processes/test_thread_contexts.py::test_reserved_and_invalid_names_are_skipped"),
    Mutation("a way to publish contexts that is not known", CONTEXTS, "if extra.get(SCHEMA) not in SCHEMAS:", "if SCHEMA not in extra:", "tests/unit/processes/test_thread_contexts.py::test_the_key_map_of_a_thread_context_is_ignored_if_the_schema_is_unsupported"),
    Mutation("an exception of a signal handler while a span is read", RECORD, "	if (!result && PyErr_Occurred() == type &&\n", "	if (result || PyErr_Occurred() == type ||\n", f"{RECORDS}[interrupts]"),
    Mutation("a span whose context cannot be read", RECORD, "	if (!result && PyErr_Occurred() == type &&\n", "	if (!result && PyErr_Occurred() != type &&\n", f"{RECORDS}[interrupts]"),
    Mutation("contexts that C code enters in each other", RECORD, "			entered = nested[at].outside;\n", "", f"{RECORDS}[c_code]"),
    Mutation("a library that is loaded after the start of thread contexts", RECORD, "	replace_imports(imports);\n	return 0;\n", "	return 0;\n", f"{RECORDS}[uvloop]"),
    Mutation("imports that the loader made read-only", "otel_kprofiler/thread_record/imports.c", "	if (is_readonly && mprotect((void *)page, size, PROT_READ | PROT_WRITE))\n", "	if (is_readonly)\n", f"{RECORDS}[c_code]"),
    Mutation("imports on a page that is only partly read-only", "otel_kprofiler/thread_record/imports.c", " && page < (end & ~(size - 1));", " && (uintptr_t)word < end;", f"{RECORDS}[c_code_in_part_of_a_page]"),
    Mutation("attributes that a record has no room for", RECORD, "	if (own.attributes_size + size <= MAX_ATTRIBUTES) {\n", "	if (size <= MAX_ATTRIBUTES) {\n", f"{RECORDS}[endpoints]"),
    Mutation("more endpoints than are kept encoded", "otel_kprofiler/sdk/thread_contexts.py", "                self._endpoints.clear()\n", "                pass\n", f"{RECORDS}[endpoints]"),
    Mutation("spans that raise when their names are encoded", "otel_kprofiler/sdk/local_roots.py", "            if len(active) > self._limit:\n                self._forget_oldest(active)\n            if self._encode", "            if self._encode", "tests/unit/sdk/test_local_roots.py::test_spans_that_raise_exceptions_neither_affect_other_spans_nor_accumulate"),
    Mutation("a span that ends while its encoded name is stored", "otel_kprofiler/sdk/local_roots.py", "a different thread\n            self._encoded.pop(span_id, None)\n", "a different thread\n            pass\n", "tests/unit/sdk/test_local_roots.py::test_the_name_of_a_span_that_ends_while_the_name_is_being_stored_is_dropped"),
    Mutation("code of another interpreter inside a span", RECORD, "	return PyInterpreterState_Get() == interpreter;\n", "	return 1;\n", f"{RECORDS}[subinterpreters]"),
    Mutation("thread contexts that are started in another interpreter", "otel_kprofiler/sdk/thread_contexts.py", "        refuse_subinterpreters()\n", "", f"{RECORDS}[start_in_a_subinterpreter]"),
    Mutation("own memory that takes too long to search", "otel_kprofiler/sdk/own_contexts.py", "        except SearchTooLongError:\n", "        except ZeroDivisionError:\n", "tests/unit/thread_record/test_embedded.py::test_a_service_reports_that_searching_its_memory_takes_too_long"),
    Mutation("a kernel without thread contexts", "otel_kprofiler/sdk/own_contexts.py", "        if not self.problem and self._reader is None:\n", "        if False:\n", "tests/unit/thread_record/test_embedded.py::test_a_warning_explains_once_why_spans_have_no_links"),
    Mutation("unsampled spans of the service in thread contexts", "otel_kprofiler/processes/resources.py", " or context[1] & _SAMPLED):\n", " or True):\n", "tests/live/test_span_links.py::test_samples_are_not_linked_to_a_published_span_that_is_not_sampled"),
    Mutation("hooks of thread contexts that fail half way", RECORD, "	Py_CLEAR(variable);\n", "", f"{RECORDS}[begin_after_a_failure]"),
    Mutation("a thread-local variable that is not resolved yet", "otel_kprofiler/processes/thread_pointer.py", "if not 0 < module < _MAX_MODULE or", "if module >= _MAX_MODULE or", "tests/unit/processes/test_thread_pointer.py::test_unrelocated_got_entries_yield_no_tls_location"),
    Mutation("a frame that replaces another", "otel_kprofiler/speedups/frame_cache.c", "	Py_XDECREF(replaced);\n", "", "tests/unit/speedups/test_speedups.py::test_tables_release_all_references"),
    Mutation("frames of a file at another address", "otel_kprofiler/speedups/frame_cache.c", "(word & ADDRESS_MASK) - (word >> SOURCE_BITS) - bias", "(word & ADDRESS_MASK) - bias", "tests/property/test_speedups.py::test_frame_caches_contain_and_find_the_same_frames"),
    Mutation("a cache of frames that grows", "otel_kprofiler/speedups/frame_cache.c", "*find_slot(table, old[at].key) = old[at];", "slots[at] = old[at];", "tests/property/test_speedups.py::test_large_frame_caches_find_all_frames"),
    Mutation("the kind of the last sample in a chunk", "otel_kprofiler/speedups/records.c", "	Py_XDECREF(parser.kind);\n", "", "tests/unit/speedups/test_speedups.py::test_samples_own_the_references_that_parsing_took"),
    Mutation("a record with a span", "otel_kprofiler/speedups/records.c", "record.span_id || ", "", "tests/unit/speedups/test_speedups.py::test_other_records_are_left_to_the_caller"),
    Mutation("a stack that equals an earlier one", "otel_kprofiler/speedups/records.c", "	return Py_NewRef(earlier);\n", "	return PyBytes_FromStringAndSize(bytes, size);\n", "tests/property/test_speedups.py::test_records_are_parsed_alike"),
    Mutation("a frame without a token", "otel_kprofiler/speedups/frame_tokens.c", "		if (!use || !use->token_bytes) {\n", "		if (!use) {\n", "tests/unit/speedups/test_speedups.py::test_a_token_that_is_not_stored_is_rejected"),
    Mutation("samples with a link", "otel_kprofiler/speedups/samples.c", "PyTuple_GetItem(sample, LINK) != Py_None", "0", "tests/unit/speedups/test_speedups.py::test_samples_that_cannot_be_encoded_are_left_to_the_caller"),
    Mutation("the size of a sample", "otel_kprofiler/speedups/samples.c", "#define SAMPLE_BYTES 4", "#define SAMPLE_BYTES 5", "tests/unit/speedups/test_speedups.py::test_samples_are_added_up_to_the_limit"),
    Mutation("a frame whose location was added before", "otel_kprofiler/speedups/locations.c", "		if (has_token(self, frame))\n			continue;\n", "", "tests/unit/speedups/test_speedups.py::test_frames_that_cannot_be_encoded_are_left_to_the_caller"),
    Mutation("frames of different kinds", "otel_kprofiler/speedups/frame_tokens.c", "memcmp(kind->fields, fields, sizeof(fields))", "0", "tests/property/test_speedups.py::test_frame_tokens_are_counted_and_joined_alike"),
    Mutation("a stack that was last used some time ago", "otel_kprofiler/speedups/stacks.c", "stack = Py_XNewRef(PyDict_GetItemWithError(finder->earlier, key));", "stack = NULL;", "tests/unit/speedups/test_batches.py::test_earlier_stacks_become_recent"),
    Mutation("a side that depends on a state", "otel_kprofiler/speedups/stacks.c", "side_key = PyTuple_Pack(3, raw, PyTuple_GetItem(outcome, 1), state);", "side_key = PyTuple_Pack(3, raw, PyTuple_GetItem(outcome, 1), Py_None);", "tests/unit/speedups/test_batches.py::test_sides_depend_on_the_state_of_their_resolver"),
    Mutation("samples with labels", "otel_kprofiler/speedups/groups.c", "PyObject_IsTrue(PyTuple_GetItem(sample, SAMPLE_LABELS))", "0", "tests/property/test_sample_batches.py::test_samples_are_grouped_alike"),
]  # fmt: skip


def compile_programs(changed: Path) -> None:
    if changed.suffix in {".c", ".h"}:
        script = changed.with_name("build.sh")
        if not script.exists():
            script = changed.parents[1] / "build_libraries.sh"
        subprocess.run(["sh", script], check=True)


def survives(mutation: Mutation, copy: Path) -> str:
    """Applies a mutation and runs its test. Returns why the mutation survived, or "" if caught."""
    path = copy / mutation.path
    source = path.read_text()
    if source.count(mutation.old) != 1:
        return f"its place occurs {source.count(mutation.old)} times in {mutation.path}"
    path.write_text(source.replace(mutation.old, mutation.new))
    try:
        compile_programs(path)
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
             "--timeout=120", *mutation.test.split()],
            cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip
    finally:
        path.write_text(source)
        compile_programs(path)
    return (
        "" if done.returncode == 1 else f"pytest ended with {done.returncode}: {done.stdout[-300:]}"
    )


def main() -> int:
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [mutation for mutation in MUTATIONS if word in mutation.fault]
    survivors = 0
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, "copy")
        for name in ("otel_kprofiler", "tests", "benchmarks", "pyproject.toml"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, copy / name)
        for mutation in chosen:
            problem = survives(mutation, copy)
            survivors += bool(problem)
            print(f"{'SURVIVED' if problem else 'noticed '} {mutation.fault} {problem}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
