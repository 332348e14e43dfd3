//! Bounds of a rendering: every text and list is counted before it is built.

use super::error::{Error, fail};
use super::value::Value;

/// Bytes of a rendered text, of any text on the way to it, and of the values that one rendering writes,
/// into macros and blocks that it keeps too. Bodies of requests are a few MiB.
pub(in crate::text) const OUTPUT: usize = 32 << 20;
/// Bytes of all texts and lists that one rendering builds.
const BUILT: usize = 512 << 20;
/// Elements of a list.
const ITEMS: usize = 1 << 20;
/// Bytes that an element of a list takes.
const ITEM: usize = 32;
/// Nesting of lists and objects.
pub(super) const DEPTH: usize = 200;
/// Elements that are compared, sorted and written, all together.
const LOOKS: usize = 20_000_000;
/// Bytes of texts that are searched, compared and measured, all together: steps are counted elsewhere, but one
/// step may go over a whole text.
const READ: usize = 1 << 30;
/// Bytes that go over a text as fast as one byte is prepared that is searched for.
const PREPARED: usize = 8;
/// Bytes that go over a text as fast as a piece is found in it.
const FOUND: usize = 16;
/// Statements and expressions that one rendering evaluates: a thousand messages take some hundred thousand.
const FUEL: u64 = 2_000_000;
/// Arguments of a call.
const ARGUMENTS: usize = 1024;
/// Nesting of macros and recursive loops.
const RECURSION: usize = 100;

/// Resources that one rendering has used.
#[derive(Debug, Default)]
pub(super) struct Limits {
    built: usize,
    looks: usize,
    read: usize,
    written: usize,
    steps: u64,
    depth: usize,
}

impl Limits {
    /// Counts a text of `bytes` that is about to be built.
    pub(super) fn build(&mut self, bytes: usize) -> Result<(), Error> {
        if bytes > OUTPUT {
            return fail(format!("a text or list would be longer than {OUTPUT} bytes"));
        }
        self.built = self.built.saturating_add(bytes);
        if self.built > BUILT {
            return fail(format!("all texts and lists together are longer than {BUILT} bytes"));
        }
        Ok(())
    }

    /// Counts a list of `items` that is about to be built.
    pub(super) fn build_list(&mut self, items: usize) -> Result<(), Error> {
        if items > ITEMS {
            return fail(format!("a list would be longer than {ITEMS} elements"));
        }
        self.built = self.built.saturating_add(items.saturating_mul(ITEM));
        if self.built > BUILT {
            return fail(format!("all texts and lists together are longer than {BUILT} bytes"));
        }
        Ok(())
    }

    /// Counts `bytes` of text that are about to be gone over.
    pub(super) fn read(&mut self, bytes: usize) -> Result<(), Error> {
        self.read = self.read.saturating_add(bytes);
        if self.read > READ {
            return fail(format!("more than {READ} bytes of texts are searched, compared or measured"));
        }
        Ok(())
    }

    /// Counts an element that is compared, sorted or written at `depth`.
    pub(super) fn look(&mut self, depth: usize) -> Result<(), Error> {
        self.nest(depth)?;
        self.looks += 1;
        if self.looks > LOOKS {
            return fail("too many elements are compared, sorted or written");
        }
        Ok(())
    }

    /// Refuses a value that is nested too deeply to be compared, written and dropped.
    pub(super) fn nest(&self, depth: usize) -> Result<(), Error> {
        if depth > DEPTH {
            return fail(format!("lists or objects are nested deeper than {DEPTH} levels"));
        }
        Ok(())
    }

    /// Counts `count` arguments of a call.
    pub(super) fn arguments(&mut self, count: usize) -> Result<(), Error> {
        if count > ARGUMENTS {
            return fail(format!("a call has more than {ARGUMENTS} arguments"));
        }
        self.build_list(count)
    }

    /// Counts a search for `part`, which is prepared byte by byte.
    pub(super) fn search(&mut self, part: &str) -> Result<(), Error> {
        self.read(part.len().saturating_mul(PREPARED))
    }

    /// Counts pieces that a search has `found`.
    pub(super) fn found(&mut self, found: usize) -> Result<(), Error> {
        self.read(found.saturating_mul(FOUND))
    }

    /// Counts what is written.
    pub(super) fn write(&mut self, bytes: usize) -> Result<(), Error> {
        self.written = self.written.saturating_add(bytes);
        if self.written > OUTPUT {
            return fail(format!("the text would be longer than {OUTPUT} bytes"));
        }
        Ok(())
    }

    /// Counts a step.
    pub(super) fn step(&mut self) -> Result<(), Error> {
        self.steps += 1;
        if self.steps > FUEL {
            fail("engine ran out of fuel: the template takes too many steps")
        } else {
            Ok(())
        }
    }

    /// Enters a macro or a recursive loop; [`Self::leave`] follows.
    pub(super) fn enter(&mut self) -> Result<(), Error> {
        if self.depth == RECURSION {
            return fail(format!("recursion deeper than {RECURSION} macros and loops"));
        }
        self.depth += 1;
        Ok(())
    }

    pub(super) fn leave(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }

    /// Looks through a value that is to be kept in a namespace, which must not come to hold itself.
    pub(super) fn keep(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.look(depth)?;
        match value {
            Value::List(items) | Value::Tuple(items) => {
                items.iter().try_for_each(|item| self.keep(item, depth + 1))
            }
            Value::Map(map) => map.entries().iter().try_for_each(|(_, item)| self.keep(item, depth + 1)),
            Value::Object(object) => object.kept(&mut |item| self.keep(item, depth + 1)),
            _ => Ok(()),
        }
    }
}
