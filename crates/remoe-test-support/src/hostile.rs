//! Generated hostile input, in one shape for all suites: a main function, a remote function, a gateway, a tenant or a client
//! sends what a [`SeededChoices`] says, at the edges of its protocol.
//!
//! Cases are numbered. Each follows from the seed and its number alone, so that one case can be repeated. A change tries some
//! hundreds; `make nightly` tries ten thousand (`REMOE_HOSTILE_CASES`) of another seed (`REMOE_HOSTILE_SEED`).

use serde_json::Value;
use std::env;
use std::str::FromStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Once};

/// The cases of one suite.
#[derive(Debug, Clone, Copy)]
pub struct Cases {
    seed: u64,
    count: usize,
}

impl Cases {
    /// Prints the seed of the suite `what`, which tries `few` cases unless the environment says how many.
    #[must_use]
    pub fn new(what: &str, few: usize) -> Self {
        let (seed, count) = (set("REMOE_HOSTILE_SEED", 1), set("REMOE_HOSTILE_CASES", few));
        println!("{what}: {count} cases; REMOE_HOSTILE_SEED={seed} REMOE_HOSTILE_CASES={count} repeats them");
        Self { seed, count }
    }

    /// Number of cases.
    #[must_use]
    pub fn count(self) -> usize {
        self.count
    }

    /// The choices of case `number`.
    #[must_use]
    pub fn dice(self, number: usize) -> SeededChoices {
        let mut dice = SeededChoices(self.seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number as u64);
        dice.draw();
        dice
    }
}

fn set<T: FromStr>(name: &str, unset: T) -> T {
    match env::var(name) {
        Ok(value) => value.parse().unwrap_or_else(|_| panic!("{name}: expected a number, got {value:?}")),
        Err(_) => unset,
    }
}

/// Choices in a fixed order that looks random (splitmix64).
#[derive(Debug, Clone)]
pub struct SeededChoices(u64);

impl SeededChoices {
    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.draw() % bound.max(1) as u64) as usize
    }

    /// True once in `often`.
    pub fn once_in(&mut self, often: usize) -> bool {
        self.below(often) == 0
    }

    /// One of `these`.
    pub fn one_of<'a, T>(&mut self, these: &'a [T]) -> &'a T {
        &these[self.below(these.len())]
    }

    /// Bytes without an order, `most` of them at most.
    pub fn noise(&mut self, most: usize) -> Vec<u8> {
        let length = self.below(most + 1);
        (0..length).map(|_| self.draw() as u8).collect()
    }

    /// A whole number at a limit of some type.
    pub fn whole(&mut self) -> u64 {
        let limits = [0, 1, 2, 127, 128, 255, 1 << 31, (1 << 31) - 1, u64::from(u32::MAX), 1 << 53, 1 << 63];
        match self.below(3) {
            0 => u64::MAX - self.below(2) as u64,
            1 => *self.one_of(&limits),
            _ => self.draw() >> self.below(64),
        }
    }

    /// A number as text, or what is none.
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

    /// The bytes of a header's value: a number, several of them, text, or no text at all.
    pub fn header_value(&mut self) -> Vec<u8> {
        match self.below(8) {
            0 => format!("{}, {}", self.number(), self.number()).into_bytes(),
            1 => vec![*self.one_of(b",;=\"'%{}[]"); self.below(4096)],
            // Obsolete text, which is no UTF-8.
            2 => (0..self.below(64)).map(|_| 0x80 | self.draw() as u8).collect(),
            3 => format!("{};dur={}", self.one_of(&["first", "load", "x", ""]), self.number()).into_bytes(),
            4 => self.json(6).into_bytes().into_iter().filter(|byte| *byte >= b' ').collect(),
            _ => self.number().into_bytes(),
        }
    }

    /// JSON, or almost; `depth` levels of it unless it is one that is deep.
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
                let name = |dice: &mut Self| match dice.below(3) {
                    0 => dice.below(1000).to_string(),
                    1 => "a".to_owned(),
                    _ => {
                        (*dice.one_of(&["model", "stream", "max_tokens", "n", "prompt", "messages", "input"]))
                            .to_owned()
                    }
                };
                let parts: Vec<_> = (0..self.below(6))
                    .map(|_| format!("\"{}\":{}", name(self), self.json(depth - 1)))
                    .collect();
                format!("{{{}}}", parts.join(","))
            }
        }
    }

    /// `bytes` with some of them changed, repeated or cut off.
    pub fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len());
            match self.below(4) {
                _ if bytes.is_empty() => return,
                0 => bytes.truncate(at),
                1 => bytes[at] = self.draw() as u8,
                2 => bytes.insert(at, self.draw() as u8),
                _ => {
                    let end = at + self.below(bytes.len() - at).min(200);
                    let piece = bytes[at..end].to_vec();
                    bytes.splice(at..at, piece);
                }
            }
        }
    }
}

/// Bytes of this process in memory.
#[must_use]
pub fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
}

/// Asserts that this process has grown by less than half of `limit` bytes since it had `before`.
pub fn has_grown_little(before: usize, limit: usize) {
    let grown = resident().saturating_sub(before);
    println!("{} MiB more are resident, of {} MiB", grown >> 20, limit >> 21);
    assert!(grown < limit / 2, "{grown} bytes more are resident; the limit of the chart is {limit}");
}

/// Counts the panics of this process from now on, in whatever thread or task.
#[must_use]
pub fn panics() -> Arc<AtomicUsize> {
    static HOOK: Once = Once::new();
    static COUNTS: std::sync::Mutex<Vec<Arc<AtomicUsize>>> = std::sync::Mutex::new(Vec::new());
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            for count in COUNTS.lock().unwrap().iter() {
                count.fetch_add(1, Ordering::SeqCst);
            }
            before(panic);
        }));
    });
    let count = Arc::new(AtomicUsize::new(0));
    COUNTS.lock().unwrap().push(count.clone());
    count
}

/// Bytes of memory that the chart allows, as the first `limits: {memory: 1Gi}` after `section:` in its values.
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
