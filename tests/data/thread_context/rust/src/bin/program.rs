//! A program that contains the writer.

fn main() {
    spans::run_program();
}
