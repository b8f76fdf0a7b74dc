//! Exports the variable, which rustc hides from other objects.
//!
//! GNU ld accepts only rustc's list of exported symbols; rust-lld also accepts ours.

fn main() {
    println!("cargo:rustc-link-arg-bins=-Wl,--export-dynamic-symbol=otel_thread_ctx_v1");
    let list = concat!(env!("CARGO_MANIFEST_DIR"), "/exports");
    println!("cargo:rustc-cdylib-link-arg=-Wl,--version-script={list}");
    println!("cargo:rerun-if-changed=exports");
}
