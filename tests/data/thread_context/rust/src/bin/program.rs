//! Has the writer in the program.

fn main() {
    spans::run_program();
}
