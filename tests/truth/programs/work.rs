// Typical work of Rust programs: closures, generics, collections, panics that are caught.
use std::collections::{BTreeMap, HashMap};
use std::hint::black_box;
use std::panic;

trait Shape {
    fn area(&self, depth: u32) -> f64;
}

struct Square(f64);
struct Group(Vec<Box<dyn Shape>>);

impl Shape for Square {
    fn area(&self, _: u32) -> f64 {
        (0..200).fold(self.0, |sum, n| black_box(sum * 1.0001 + n as f64))
    }
}

impl Shape for Group {
    fn area(&self, depth: u32) -> f64 {
        self.0.iter().map(|shape| shape.area(depth + 1)).sum()
    }
}

fn group(depth: u32) -> Box<dyn Shape> {
    if depth == 0 {
        return Box::new(Square(1.0));
    }
    Box::new(Group((0..3).map(|_| group(depth - 1)).collect()))
}

#[inline(never)]
fn fib(n: u64) -> u64 {
    if n < 2 { n } else { black_box(fib(n - 1)) + black_box(fib(n - 2)) }
}

fn work(n: usize) {
    match n % 7 {
        0 => {
            fib(22);
        }
        1 => {
            black_box(group(6).area(0));
        }
        2 => {
            let mut words: Vec<String> = (0..3000).map(|i| format!("{:x}", i * 7919 % 1009)).collect();
            words.sort_by(|a, b| b.len().cmp(&a.len()).then_with(|| a.cmp(b)));
            black_box(words);
        }
        3 => {
            let counts: HashMap<String, usize> = (0..2000).map(|i| (i.to_string(), i)).collect();
            black_box(counts.values().sum::<usize>());
        }
        4 => {
            let tree: BTreeMap<usize, Vec<usize>> = (0..2000).map(|i| (i * 31 % 997, vec![i; 8])).collect();
            black_box(tree.range(10..500).count());
        }
        5 if cfg!(panic = "unwind") => {
            for _ in 0..50 {
                let _ = panic::catch_unwind(|| {
                    if black_box(true) {
                        panic!("on purpose");
                    }
                });
            }
        }
        _ => {
            let text = "some text ".repeat(3000);
            black_box(text.split(' ').filter(|word| word.contains("ex")).count());
        }
    }
}

fn main() {
    panic::set_hook(Box::new(|_| ()));
    std::thread::spawn(|| (0..).for_each(work));
    (3..).for_each(work);
}
