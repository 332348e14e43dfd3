//! Values of a rendering, with the semantics of Python. Lists and dictionaries are immutable, as the sandbox of
//! transformers forbids modifying them.

use std::collections::HashMap;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value as Json;

use super::error::{Error, fail};
use super::limits::Limits;
use super::objects::Object;

/// Value of an expression.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// Jinja2's `Undefined`, with the message of the error that its use raises.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Map(Rc<Map>),
    Object(Rc<Object>),
}

/// Elements of a list or tuple, and the depth of the deepest one.
#[derive(Clone, Debug, Default)]
pub(super) struct Items {
    values: Vec<Value>,
    depth: usize,
}

impl Items {
    pub(super) fn new(values: Vec<Value>) -> Self {
        let depth = values.iter().map(Value::depth).max().unwrap_or(0);
        Self { values, depth }
    }

    pub(super) fn into_values(self) -> Vec<Value> {
        self.values
    }

    /// Returns the levels of containers in the deepest element.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }
}

impl Deref for Items {
    type Target = Vec<Value>;

    fn deref(&self) -> &Vec<Value> {
        &self.values
    }
}

impl<'a> IntoIterator for &'a Items {
    type Item = &'a Value;
    type IntoIter = std::slice::Iter<'a, Value>;

    fn into_iter(self) -> Self::IntoIter {
        self.values.iter()
    }
}

/// Dictionary with its entries in order of insertion.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    depth: usize,
    entries: Vec<(Value, Value)>,
    indices: HashMap<Key, usize>,
}

/// Hashable form of a dictionary's key: values that are equal in Python have equal keys.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Key {
    Undefined,
    None,
    Int(i128),
    Float(u64),
    Text(Arc<str>),
    Tuple(Vec<Key>),
}

impl Map {
    pub(super) fn insert(&mut self, limits: &mut Limits, key: Value, value: Value) -> Result<(), Error> {
        let hashed = key.key(limits)?;
        self.depth = self.depth.max(key.depth()).max(value.depth());
        match self.indices.get(&hashed).and_then(|index| self.entries.get_mut(*index)) {
            Some(entry) => entry.1 = value,
            None => {
                self.indices.insert(hashed, self.entries.len());
                self.entries.push((key, value));
            }
        }
        Ok(())
    }

    pub(super) fn insert_text(&mut self, name: &str, value: Value) {
        let name: Arc<str> = name.into();
        self.depth = self.depth.max(value.depth());
        match self.indices.get(&Key::Text(name.clone())).and_then(|index| self.entries.get_mut(*index)) {
            Some(entry) => entry.1 = value,
            None => {
                self.indices.insert(Key::Text(name.clone()), self.entries.len());
                self.entries.push((Value::Text(name), value));
            }
        }
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Value> {
        self.indices.get(key).and_then(|index| self.entries.get(*index)).map(|(_, value)| value)
    }

    pub(super) fn get_text(&self, name: &str) -> Option<&Value> {
        self.get(&Key::Text(name.into()))
    }

    /// Returns the levels of containers in the deepest key or value.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

impl Value {
    pub(super) fn text(text: &str) -> Self {
        Self::Text(text.into())
    }

    pub(super) fn list(items: Vec<Self>) -> Self {
        Self::List(Rc::new(Items::new(items)))
    }

    pub(super) fn tuple(items: Vec<Self>) -> Self {
        Self::Tuple(Rc::new(Items::new(items)))
    }

    pub(super) fn map(map: Map) -> Self {
        Self::Map(Rc::new(map))
    }

    pub(super) fn object(object: Object) -> Self {
        Self::Object(Rc::new(object))
    }

    pub(super) fn markup(text: impl Into<Arc<str>>) -> Self {
        Self::object(Object::Markup(text.into()))
    }

    /// Returns the plain text of markup, and any other value unchanged.
    pub(super) fn without_markup(self) -> Self {
        match &self {
            Self::Object(object) => match &**object {
                Object::Markup(text) => Self::Text(text.clone()),
                _ => self,
            },
            _ => self,
        }
    }

    pub(super) fn from_count(number: usize) -> Self {
        Self::Int(i128::try_from(number).unwrap_or(i128::MAX))
    }

    /// Returns the levels of containers: 0 for a plain value, 1 for a list of plain values.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::List(items) | Self::Tuple(items) => items.depth() + 1,
            Self::Map(map) => map.depth() + 1,
            Self::Object(object) => object.depth(),
            _ => 0,
        }
    }

    /// Creates an undefined value, whose use raises `message`.
    pub(super) fn undefined(message: impl AsRef<str>) -> Self {
        Self::Undefined(message.as_ref().into())
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// Returns the whole number; booleans are numbers in Python.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Bool(flag) => Some(i128::from(*flag)),
            Self::Int(number) => Some(*number),
            _ => None,
        }
    }

    #[allow(clippy::cast_precision_loss)]
    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(number) => Some(*number),
            other => other.as_int().map(|number| number as f64),
        }
    }

    /// Returns the name of the value's type in Python.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Text(_) => "str",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Map(_) => "dict",
            Self::Object(object) => object.type_name(),
        }
    }

    /// Evaluates Python's `bool(value)`.
    pub(super) fn is_truthy(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(flag) => *flag,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Text(text) => !text.is_empty(),
            Self::List(items) | Self::Tuple(items) => !items.is_empty(),
            Self::Map(map) => map.len() > 0,
            Self::Object(object) => object.length().is_none_or(|length| length > 0),
        }
    }

    /// Returns the value as a key of a dictionary, and charges the elements that are hashed.
    pub(super) fn key(&self, limits: &mut Limits) -> Result<Key, Error> {
        self.key_at_depth(limits, 0)
    }

    fn key_at_depth(&self, limits: &mut Limits, depth: usize) -> Result<Key, Error> {
        limits.charge_visit(depth)?;
        Ok(match self {
            Self::Undefined(_) => Key::Undefined,
            Self::None => Key::None,
            Self::Bool(_) | Self::Int(_) => Key::Int(self.as_int().unwrap_or_default()),
            Self::Float(number) => {
                #[allow(clippy::cast_possible_truncation, clippy::cast_precision_loss)]
                let whole = *number as i128;
                #[allow(clippy::cast_precision_loss, clippy::float_cmp)]
                if whole as f64 == *number { Key::Int(whole) } else { Key::Float(number.to_bits()) }
            }
            Self::Text(text) => {
                limits.charge_read(text.len())?;
                Key::Text(text.clone())
            }
            Self::Tuple(items) if depth < 16 => {
                limits.charge_list(items.len())?;
                let keys = items.iter().map(|item| item.key_at_depth(limits, depth + 1));
                Key::Tuple(keys.collect::<Result<_, _>>()?)
            }
            other => return fail(format!("unhashable type: '{}'", other.type_name())),
        })
    }

    /// Converts a JSON value.
    pub(super) fn from_json(json: &Json) -> Self {
        match json {
            Json::Null => Self::None,
            Json::Bool(flag) => Self::Bool(*flag),
            Json::Number(number) => match number.as_i64().map(i128::from).or(number.as_u64().map(i128::from))
            {
                Some(whole) => Self::Int(whole),
                None => Self::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            Json::String(text) => Self::text(text),
            Json::Array(items) => Self::list(items.iter().map(Self::from_json).collect()),
            Json::Object(object) => {
                let mut map = Map::default();
                for (name, value) in object {
                    map.insert_text(name, Self::from_json(value));
                }
                Self::map(map)
            }
        }
    }
}
