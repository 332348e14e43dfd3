//! Generated hostile input, common to all suites: a main function, a remote function, a gateway, a tenant or a client
//! sends data at the limits of its protocol, by a [`SeededChoices`].
//!
//! Each case depends only on the seed and its number, so that it can be repeated. A normal run tries some hundreds.
//! `make nightly` tries ten thousand (`REMOE_HOSTILE_CASES`) with another seed (`REMOE_HOSTILE_SEED`).

use serde_json::Value;
use std::env;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};

/// Cases of one suite.
#[derive(Debug, Clone, Copy)]
pub struct Cases {
    seed: u64,
    count: usize,
}

impl Cases {
    /// Creates the cases of the suite `what`, `default_count` unless the environment sets another number, and prints
    /// their seed.
    #[must_use]
    pub fn new(what: &str, default_count: usize) -> Self {
        let (seed, count) = (
            number_from_environment("REMOE_HOSTILE_SEED", 1),
            number_from_environment("REMOE_HOSTILE_CASES", default_count),
        );
        println!("{what}: {count} cases; REMOE_HOSTILE_SEED={seed} REMOE_HOSTILE_CASES={count} repeats them");
        Self { seed, count }
    }

    /// Returns the number of cases.
    #[must_use]
    pub fn count(self) -> usize {
        self.count
    }

    /// Returns the choices of case `number`.
    #[must_use]
    pub fn choices(self, number: usize) -> SeededChoices {
        let mut choices = SeededChoices(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number as u64);
        choices.draw();
        choices
    }
}

fn number_from_environment<T: FromStr>(name: &str, unset: T) -> T {
    match env::var(name) {
        Ok(value) => value.parse().unwrap_or_else(|_| panic!("{name}: expected a number, got {value:?}")),
        Err(_) => unset,
    }
}

/// Pseudo-random choices by SplitMix64.
#[derive(Debug, Clone)]
pub struct SeededChoices(u64);

impl SeededChoices {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.draw() % bound.max(1) as u64) as usize
    }

    /// Returns true once in `interval` calls on average.
    pub fn once_in(&mut self, interval: usize) -> bool {
        self.below(interval) == 0
    }

    /// Returns one of `options`.
    pub fn one_of<'a, T>(&mut self, options: &'a [T]) -> &'a T {
        &options[self.below(options.len())]
    }

    /// Returns at most `max_length` random bytes.
    pub fn noise(&mut self, max_length: usize) -> Vec<u8> {
        let length = self.below(max_length + 1);
        (0..length).map(|_| self.draw() as u8).collect()
    }

    /// Returns an integer, often at the limit of some type.
    pub fn whole(&mut self) -> u64 {
        let limits = [0, 1, 2, 127, 128, 255, 1 << 31, (1 << 31) - 1, u64::from(u32::MAX), 1 << 53, 1 << 63];
        match self.below(3) {
            0 => u64::MAX - self.below(2) as u64,
            1 => *self.one_of(&limits),
            _ => self.draw() >> self.below(64),
        }
    }

    /// Returns a number as text, or an invalid number.
    pub fn number(&mut self) -> String {
        const ODD: [&str; 18] = [
            "-1",
            "-0",
            "18446744073709551616",
            "340282366920938463463374607431768211456",
            "1e308",
            "1e309",
            "-1e309",
            "1e-400",
            "NaN",
            "inf",
            "-inf",
            "Infinity",
            "0x10",
            "1_000",
            "+1",
            " 1 ",
            "",
            "1.7976931348623157e308",
        ];
        if self.once_in(2) { self.whole().to_string() } else { (*self.one_of(&ODD)).to_owned() }
    }

    /// Returns the value of a header: numbers, text, or invalid bytes.
    pub fn header_value(&mut self) -> Vec<u8> {
        match self.below(8) {
            0 => format!("{}, {}", self.number(), self.number()).into_bytes(),
            1 => vec![*self.one_of(b",;=\"'%{}[]"); self.below(4096)],
            // Obsolete text, which is not UTF-8.
            2 => (0..self.below(64)).map(|_| 0x80 | self.draw() as u8).collect(),
            3 => format!("{};dur={}", self.one_of(&["first", "load", "x", ""]), self.number()).into_bytes(),
            4 => self.json(6).into_bytes().into_iter().filter(|byte| *byte >= b' ').collect(),
            _ => self.number().into_bytes(),
        }
    }

    /// Returns valid or almost valid JSON of `depth` levels, or with very deep nesting.
    pub fn json(&mut self, depth: usize) -> String {
        match self.below(if depth == 0 { 6 } else { 12 }) {
            0 | 1 => self.number(),
            2 => "null".to_owned(),
            3 => "\"\\u0000\\ud800\"".to_owned(),
            4 => Value::from("x".repeat(self.below(100))).to_string(),
            5 => (*self.one_of(&["true", "{", "[", "]", "\"", "", "{}", "[]"])).to_owned(),
            6 => {
                let levels = self.below(20_000);
                format!("{}{}", "[".repeat(levels), "]".repeat(levels))
            }
            7 | 8 => {
                let parts: Vec<_> = (0..self.below(6)).map(|_| self.json(depth - 1)).collect();
                format!("[{}]", parts.join(","))
            }
            _ => {
                let name = |choices: &mut Self| match choices.below(3) {
                    0 => choices.below(1000).to_string(),
                    1 => "a".to_owned(),
                    _ => (*choices.one_of(&[
                        "model",
                        "stream",
                        "max_tokens",
                        "n",
                        "prompt",
                        "messages",
                        "input",
                    ]))
                    .to_owned(),
                };
                let parts: Vec<_> = (0..self.below(6))
                    .map(|_| format!("\"{}\":{}", name(self), self.json(depth - 1)))
                    .collect();
                format!("{{{}}}", parts.join(","))
            }
        }
    }

    /// Changes, repeats or truncates some of `bytes`.
    pub fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let position = self.below(bytes.len());
            match self.below(4) {
                _ if bytes.is_empty() => return,
                0 => bytes.truncate(position),
                1 => bytes[position] = self.draw() as u8,
                2 => bytes.insert(position, self.draw() as u8),
                _ => {
                    let end = position + self.below(bytes.len() - position).min(200);
                    let piece = bytes[position..end].to_vec();
                    bytes.splice(position..position, piece);
                }
            }
        }
    }
}

/// Returns the resident memory of this process, in bytes.
#[must_use]
pub fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Asserts that resident memory has grown by less than half of `limit` bytes since it was `before`.
pub fn has_grown_little(before: usize, limit: usize) {
    let grown = resident().saturating_sub(before);
    println!("{} MiB more are resident, of {} MiB", grown >> 20, limit >> 21);
    assert!(grown < limit / 2, "{grown} bytes more are resident; the limit of the chart is {limit}");
}

/// Returns a counter of all panics in this process from now on.
#[must_use]
pub fn panics() -> Arc<AtomicUsize> {
    static HOOK: Once = Once::new();
    static COUNTS: std::sync::Mutex<Vec<Arc<AtomicUsize>>> = std::sync::Mutex::new(Vec::new());
    HOOK.call_once(|| {
        let previous_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            for count in COUNTS.lock().unwrap().iter() {
                count.fetch_add(1, Ordering::SeqCst);
            }
            previous_hook(panic);
        }));
    });
    let count = Arc::new(AtomicUsize::new(0));
    COUNTS.lock().unwrap().push(count.clone());
    count
}

/// Returns the memory limit of a component in the chart's values, in bytes: the first `limits: {memory: 1Gi}` after
/// `section:`.
#[must_use]
pub fn chart_limit(section: &str) -> usize {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../charts/remoe/values.yaml");
    let values = std::fs::read_to_string(file).unwrap();
    let begin = values.find(&format!("\n{section}:\n")).expect("a section of the chart");
    let (_, rest) = values[begin..].split_once("limits: {memory: ").expect("a limit of memory");
    let (limit, _) = rest.split_once('}').unwrap();
    let (number, unit) = limit.split_at(limit.len() - 2);
    number.parse::<usize>().unwrap() << if unit == "Gi" { 30 } else { 20 }
}
