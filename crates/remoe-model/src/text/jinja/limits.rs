//! Limits of a rendering. Each text and list is charged before it is built.

use super::error::{Error, fail};
use super::value::Value;

/// Most bytes of a text, and of all output of a rendering, including captured blocks and macros. Requests have a few
/// MiB.
pub(in crate::text) const MAX_TEXT_BYTES: usize = 32 << 20;
/// Most bytes of all texts and lists that a rendering builds.
const MAX_BUILT_BYTES: usize = 512 << 20;
/// Most elements of a list.
const MAX_LIST_ITEMS: usize = 1 << 20;
/// Bytes charged for an element of a list.
const LIST_ITEM_BYTES: usize = 32;
/// Deepest nesting of lists and objects.
pub(super) const MAX_DEPTH: usize = 200;
/// Most elements that a rendering compares, sorts, hashes and writes.
const MAX_VISITS: usize = 20_000_000;
/// Most bytes of text that a rendering searches, compares and measures; a single step may read a whole text.
const MAX_READ_BYTES: usize = 1 << 30;
/// Bytes charged for preparing the search for one byte.
const SEARCH_SETUP_BYTES: usize = 8;
/// Bytes charged for one match of a search.
const MATCH_BYTES: usize = 16;
/// Most statements and expressions that a rendering evaluates; a thousand messages take a few hundred thousand.
const MAX_STEPS: u64 = 2_000_000;
/// Most arguments of a call.
const MAX_ARGUMENTS: usize = 1024;
/// Deepest nesting of calls of macros and recursive loops.
const MAX_RECURSION: usize = 100;

/// Resources that one rendering has used.
#[derive(Debug, Default)]
pub(super) struct Limits {
    built: usize,
    visits: usize,
    read: usize,
    written: usize,
    steps: u64,
    depth: usize,
}

impl Limits {
    /// Charges a text of `bytes` that is about to be built.
    pub(super) fn charge_text(&mut self, bytes: usize) -> Result<(), Error> {
        if bytes > MAX_TEXT_BYTES {
            return fail(format!("a text or list would be longer than {MAX_TEXT_BYTES} bytes"));
        }
        self.built = self.built.saturating_add(bytes);
        if self.built > MAX_BUILT_BYTES {
            return fail(format!("all texts and lists together are longer than {MAX_BUILT_BYTES} bytes"));
        }
        Ok(())
    }

    /// Charges a list of `items` elements that is about to be built.
    pub(super) fn charge_list(&mut self, items: usize) -> Result<(), Error> {
        if items > MAX_LIST_ITEMS {
            return fail(format!("a list would be longer than {MAX_LIST_ITEMS} elements"));
        }
        self.built = self.built.saturating_add(items.saturating_mul(LIST_ITEM_BYTES));
        if self.built > MAX_BUILT_BYTES {
            return fail(format!("all texts and lists together are longer than {MAX_BUILT_BYTES} bytes"));
        }
        Ok(())
    }

    /// Charges `bytes` of text that are about to be read.
    pub(super) fn charge_read(&mut self, bytes: usize) -> Result<(), Error> {
        self.read = self.read.saturating_add(bytes);
        if self.read > MAX_READ_BYTES {
            return fail(format!(
                "more than {MAX_READ_BYTES} bytes of texts are searched, compared or measured"
            ));
        }
        Ok(())
    }

    /// Charges an element at `depth` that is about to be compared, sorted, hashed or written.
    pub(super) fn charge_visit(&mut self, depth: usize) -> Result<(), Error> {
        self.check_depth(depth)?;
        self.visits += 1;
        if self.visits > MAX_VISITS {
            return fail("too many elements are compared, sorted or written");
        }
        Ok(())
    }

    /// Refuses a depth at which comparing, writing or dropping a value could exhaust the stack.
    pub(super) fn check_depth(&self, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return fail(format!("lists or objects are nested deeper than {MAX_DEPTH} levels"));
        }
        Ok(())
    }

    /// Charges `count` arguments of a call.
    pub(super) fn charge_arguments(&mut self, count: usize) -> Result<(), Error> {
        if count > MAX_ARGUMENTS {
            return fail(format!("a call has more than {MAX_ARGUMENTS} arguments"));
        }
        self.charge_list(count)
    }

    /// Charges the preparation of a search for `part`.
    pub(super) fn charge_search(&mut self, part: &str) -> Result<(), Error> {
        self.charge_read(part.len().saturating_mul(SEARCH_SETUP_BYTES))
    }

    /// Charges the matches that a search has `found`.
    pub(super) fn charge_matches(&mut self, found: usize) -> Result<(), Error> {
        self.charge_read(found.saturating_mul(MATCH_BYTES))
    }

    /// Charges `bytes` of output.
    pub(super) fn charge_output(&mut self, bytes: usize) -> Result<(), Error> {
        self.written = self.written.saturating_add(bytes);
        if self.written > MAX_TEXT_BYTES {
            return fail(format!("the text would be longer than {MAX_TEXT_BYTES} bytes"));
        }
        Ok(())
    }

    /// Charges a statement or an expression.
    pub(super) fn charge_step(&mut self) -> Result<(), Error> {
        self.steps += 1;
        if self.steps > MAX_STEPS {
            fail("engine ran out of fuel: the template takes too many steps")
        } else {
            Ok(())
        }
    }

    /// Enters a call of a macro or of a recursive loop, which [`Self::leave_call`] ends.
    pub(super) fn enter_call(&mut self) -> Result<(), Error> {
        if self.depth == MAX_RECURSION {
            return fail(format!("recursion deeper than {MAX_RECURSION} macros and loops"));
        }
        self.depth += 1;
        Ok(())
    }

    /// Leaves a call.
    pub(super) fn leave_call(&mut self) {
        self.depth = self.depth.saturating_sub(1);
    }

    /// Charges a value that is to be stored in a namespace, and refuses one that could make the namespace contain
    /// itself.
    pub(super) fn check_stored(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.charge_visit(depth)?;
        match value {
            Value::List(items) | Value::Tuple(items) => {
                items.iter().try_for_each(|item| self.check_stored(item, depth + 1))
            }
            Value::Map(map) => {
                map.entries().iter().try_for_each(|(_, item)| self.check_stored(item, depth + 1))
            }
            Value::Object(object) => object.visit_stored(&mut |item| self.check_stored(item, depth + 1)),
            _ => Ok(()),
        }
    }
}
