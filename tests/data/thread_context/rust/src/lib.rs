//! Threads that change their contexts at random, and log the times, until the input ends.

use libdd_library_config::otel_process_ctx;
use libdd_library_config::tracer_metadata::{ThreadLocalMetadata, TracerMetadata};
use libdd_otel_thread_ctx::linux::OwnedThreadContext;
use std::fs::File;
use std::io::{Read, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

const MOST: usize = 60000;
static STOP: AtomicBool = AtomicBool::new(false);

/// The times at which a context is not yet published, published, about to end, and ended.
#[derive(Clone, Copy)]
struct Line {
    from: u64,
    since: u64,
    until: u64,
    end: u64,
    trace: [u8; 16],
    span: [u8; 8],
}

struct Random(u64);

impl Random {
    fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn work(&mut self) {
        let end = now() + self.draw() % 2_000_000;
        let kind = self.draw() % 8;
        if kind == 0 {
            thread::sleep(Duration::from_micros(self.draw() % 3000));
            return;
        }
        while now() < end {
            if kind < 4 {
                unsafe { libc::syscall(libc::SYS_getppid) };
            }
        }
    }
}

fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

fn run(number: u64) -> (u64, Vec<Line>) {
    let mut random = Random(number.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let mut lines: Vec<Line> = Vec::with_capacity(MOST);
    let mut attached = false;
    while !STOP.load(Ordering::Relaxed) && lines.len() < MOST {
        let kind = random.draw() % 4;
        let until = now();
        if kind == 0 {
            drop(OwnedThreadContext::detach());
            if attached {
                let last = lines.last_mut().unwrap();
                (last.until, last.end) = (until, now());
            }
            attached = false;
            random.work();
            continue;
        }
        let mut trace = [0; 16];
        trace[..8].copy_from_slice(&random.draw().to_ne_bytes());
        trace[8..].copy_from_slice(&number.to_ne_bytes());
        let span = random.draw().to_ne_bytes();
        let hex: String = span.iter().map(|byte| format!("{byte:02x}")).collect();
        let flags = trace[0] & 1;
        let attributes = [(1, hex.as_str())];
        let from = now();
        if kind == 1 {
            let context = OwnedThreadContext::new(trace, span, flags, span, &attributes);
            drop(context.attach());
        } else {
            OwnedThreadContext::update(trace, span, flags, span, &attributes);
        }
        let since = now();
        if attached {
            let last = lines.last_mut().unwrap();
            (last.until, last.end) = (until, since);
        }
        attached = true;
        lines.push(Line { from, since, until: u64::MAX, end: u64::MAX, trace, span });
        random.work();
    }
    let until = now();
    drop(OwnedThreadContext::detach());
    if attached {
        let last = lines.last_mut().unwrap();
        (last.until, last.end) = (until, now());
    }
    (unsafe { libc::syscall(libc::SYS_gettid) } as u64, lines)
}

/// Publishes the process context, runs the threads, and writes the log.
fn run_all(log: &str, threads: u64) {
    let metadata = TracerMetadata {
        tracer_language: "rust".into(),
        service_name: Some("native".into()),
        threadlocal_metadata: Some(ThreadLocalMetadata {
            attribute_keys: vec!["span.hex".into()],
            ..Default::default()
        }),
        ..Default::default()
    };
    otel_process_ctx::publish(&metadata.to_otel_process_ctx()).unwrap();
    println!("ready");
    let started: Vec<_> =
        (1..=threads).map(|number| thread::spawn(move || run(number))).collect();
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    STOP.store(true, Ordering::Relaxed);
    let mut file = File::create(log).unwrap();
    for thread in started {
        let (tid, lines) = thread.join().unwrap();
        for line in lines {
            for word in [line.from, line.since, line.until, line.end, tid] {
                file.write_all(&word.to_ne_bytes()).unwrap();
            }
            file.write_all(&line.trace).unwrap();
            file.write_all(&line.span).unwrap();
        }
    }
    println!("done");
}

/// Runs the program, also if this file is opened as a library: `program LOG THREADS`.
#[unsafe(no_mangle)]
pub extern "C" fn run_program() {
    let words: Vec<String> = std::env::args().collect();
    run_all(&words[1], words[2].parse().unwrap());
}
