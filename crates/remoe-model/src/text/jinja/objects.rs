//! Values beyond Python's plain ones: what Jinja2 and its filters hand to templates.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use super::error::{Error, fail};
use super::value::{Items, Map, Value};

/// An object of a template.
#[derive(Debug)]
pub(super) enum Object {
    /// Items that can be gone over once.
    Generator(RefCell<Items>),
    /// `dict.keys()`, `.values()` and `.items()`.
    View(View, Rc<Map>),
    Range(Range),
    Namespace(RefCell<Map>),
    Cycler(Items, Cell<usize>),
    Joiner(Value, Cell<bool>),
    /// A macro by its number, and the scope that it was made in.
    Macro(usize, usize, Arc<str>),
    /// A function of the environment.
    Function(&'static str),
    /// A text that `safe` or `escape` has marked: what is added to it is escaped.
    Markup(Arc<str>),
    /// A method of a value.
    Method(Value, Arc<str>),
    Loop(Loop),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    Keys,
    Values,
    Items,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) start: i128,
    pub(super) stop: i128,
    pub(super) step: i128,
    pub(super) length: usize,
}

/// The variable `loop`.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) items: Rc<Items>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    /// The number of the recursive loop that calls go to.
    pub(super) recursive: Option<usize>,
    pub(super) changed: RefCell<Option<Vec<Value>>>,
}

impl View {
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

impl Range {
    pub(super) fn get(&self, index: usize) -> Value {
        Value::Int(self.start + self.step * i128::try_from(index).unwrap_or(0))
    }

    pub(super) fn items(&self) -> Vec<Value> {
        (0..self.length).map(|index| self.get(index)).collect()
    }
}

impl Loop {
    /// An attribute of `loop`.
    pub(super) fn attribute(&self, name: &str) -> Option<Value> {
        let (index, length) = (self.index.get(), self.items.len());
        Some(match name {
            "index" => Value::count(index + 1),
            "index0" => Value::count(index),
            "revindex" => Value::count(length.saturating_sub(index)),
            "revindex0" => Value::count(length.saturating_sub(index + 1)),
            "first" => Value::Bool(index == 0),
            "last" => Value::Bool(index + 1 >= length),
            "length" => Value::count(length),
            "depth" => Value::count(self.depth + 1),
            "depth0" => Value::count(self.depth),
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
    pub(super) fn generator(mut items: Vec<Value>) -> Value {
        // The next one is the last.
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

    /// Length, where Python has one.
    pub(super) fn length(&self) -> Option<usize> {
        match self {
            Self::View(_, map) => Some(map.len()),
            Self::Range(range) => Some(range.length),
            Self::Loop(state) => Some(state.items.len()),
            Self::Markup(text) => Some(text.len()),
            _ => None,
        }
    }

    /// Levels of containers. A namespace counts as none: [`Limits::keep`](super::limits::Limits::keep) bounds
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

    /// Shows `look` the values that it holds, where it may be kept in a namespace.
    pub(super) fn kept(&self, look: &mut dyn FnMut(&Value) -> Result<(), Error>) -> Result<(), Error> {
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
