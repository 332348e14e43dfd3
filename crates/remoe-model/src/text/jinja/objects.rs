//! Objects of Jinja2 and of its functions and filters, beyond plain Python values.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::error::{Error, fail};
use super::value::{Items, Map, Value};

/// Object that a template can use but not write as a literal.
#[derive(Debug)]
pub(super) enum Object {
    /// Items that can be iterated once, in reverse order.
    Generator(RefCell<Items>),
    /// `dict.keys()`, `.values()` and `.items()`.
    View(DictView, Rc<Map>),
    Range(RangeObject),
    Namespace(RefCell<Map>),
    Cycler(Items, Cell<usize>),
    Joiner(Value, Cell<bool>),
    /// Macro by its index, the scope of its definition, and its name.
    Macro(usize, usize, Arc<str>),
    /// Function of the environment.
    Function(&'static str),
    /// Text that `safe` or `escape` has marked; text that is added to it is escaped.
    Markup(Arc<str>),
    /// Method of a value, by its name.
    Method(Value, Arc<str>),
    Loop(LoopState),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DictView {
    Keys,
    Values,
    Items,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RangeObject {
    pub(super) start: i128,
    pub(super) stop: i128,
    pub(super) step: i128,
    pub(super) length: usize,
}

/// State behind the variable `loop`.
#[derive(Debug)]
pub(super) struct LoopState {
    pub(super) items: Rc<Items>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    /// Index of the recursive loop that a call of `loop` runs again.
    pub(super) recursive: Option<usize>,
    pub(super) changed: RefCell<Option<Vec<Value>>>,
}

impl DictView {
    pub(super) fn type_name(self) -> &'static str {
        match self {
            Self::Keys => "dict_keys",
            Self::Values => "dict_values",
            Self::Items => "dict_items",
        }
    }

    pub(super) fn items(self, map: &Map) -> Vec<Value> {
        let item = |(key, value): &(Value, Value)| match self {
            Self::Keys => key.clone(),
            Self::Values => value.clone(),
            Self::Items => Value::tuple(vec![key.clone(), value.clone()]),
        };
        map.entries().iter().map(item).collect()
    }
}

impl RangeObject {
    pub(super) fn get(&self, index: usize) -> Value {
        Value::Int(self.start + self.step * i128::try_from(index).unwrap_or(0))
    }

    pub(super) fn items(&self) -> Vec<Value> {
        (0..self.length).map(|index| self.get(index)).collect()
    }
}

impl LoopState {
    /// Returns an attribute of `loop`.
    pub(super) fn attribute(&self, name: &str) -> Option<Value> {
        let (index, length) = (self.index.get(), self.items.len());
        Some(match name {
            "index" => Value::from_count(index + 1),
            "index0" => Value::from_count(index),
            "revindex" => Value::from_count(length.saturating_sub(index)),
            "revindex0" => Value::from_count(length.saturating_sub(index + 1)),
            "first" => Value::Bool(index == 0),
            "last" => Value::Bool(index + 1 >= length),
            "length" => Value::from_count(length),
            "depth" => Value::from_count(self.depth + 1),
            "depth0" => Value::from_count(self.depth),
            "previtem" => match index.checked_sub(1).and_then(|previous| self.items.get(previous)) {
                Some(item) => item.clone(),
                None => Value::undefined("there is no previous item"),
            },
            "nextitem" => match self.items.get(index + 1) {
                Some(item) => item.clone(),
                None => Value::undefined("there is no next item"),
            },
            _ => return None,
        })
    }
}

impl Object {
    /// Creates a generator of `items`.
    pub(super) fn generator(mut items: Vec<Value>) -> Value {
        // Reversed, so that the next item is the last one.
        items.reverse();
        Value::object(Self::Generator(RefCell::new(Items::new(items))))
    }

    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Generator(_) => "generator",
            Self::View(view, _) => view.type_name(),
            Self::Range(_) => "range",
            Self::Namespace(_) => "Namespace",
            Self::Cycler(..) => "Cycler",
            Self::Joiner(..) => "Joiner",
            Self::Macro(..) => "Macro",
            Self::Function(_) => "function",
            Self::Markup(_) => "Markup",
            Self::Method(..) => "builtin_function_or_method",
            Self::Loop(_) => "LoopContext",
        }
    }

    /// Returns the length, if the Python object has one.
    pub(super) fn length(&self) -> Option<usize> {
        match self {
            Self::View(_, map) => Some(map.len()),
            Self::Range(range) => Some(range.length),
            Self::Loop(state) => Some(state.items.len()),
            Self::Markup(text) => Some(text.len()),
            _ => None,
        }
    }

    /// Returns the levels of containers. A namespace counts as none: [`Limits::check_stored`](super::limits::Limits::check_stored) bounds
    /// what it holds.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::Generator(items) => items.borrow().depth() + 1,
            Self::Cycler(items, _) => items.depth() + 1,
            Self::Loop(state) => state.items.depth() + 1,
            Self::View(_, map) => map.depth() + 1,
            Self::Joiner(value, _) | Self::Method(value, _) => value.depth() + 1,
            Self::Range(_) | Self::Namespace(_) | Self::Macro(..) | Self::Function(_) | Self::Markup(_) => 0,
        }
    }

    pub(super) fn is_callable(&self) -> bool {
        match self {
            Self::Joiner(..) | Self::Macro(..) | Self::Function(_) | Self::Method(..) | Self::Loop(_) => true,
            Self::Generator(_)
            | Self::View(..)
            | Self::Range(_)
            | Self::Namespace(_)
            | Self::Cycler(..)
            | Self::Markup(_) => false,
        }
    }

    /// Passes the values that the object holds to `look`.
    ///
    /// # Errors
    /// The object must not be stored in a namespace, or `look` fails.
    pub(super) fn visit_stored(
        &self,
        look: &mut dyn FnMut(&Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        match self {
            Self::Namespace(_) => fail("a namespace cannot be put into a namespace"),
            Self::Loop(_) => fail("a loop cannot be put into a namespace, or into `loop.changed`"),
            Self::Generator(items) => items.borrow().iter().try_for_each(look),
            Self::Cycler(items, _) => items.iter().try_for_each(look),
            Self::View(_, map) => map.entries().iter().try_for_each(|(_, item)| look(item)),
            Self::Joiner(value, _) | Self::Method(value, _) => look(value),
            Self::Range(_) | Self::Macro(..) | Self::Function(_) | Self::Markup(_) => Ok(()),
        }
    }
}
