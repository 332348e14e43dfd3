//! Values of a rendering, as Python has them. Lists and objects never change: the sandbox of transformers forbids it.

use std::collections::HashMap;
use std::ops::Deref;
use std::rc::Rc;
use std::sync::Arc;

use serde_json::Value as Json;

use super::error::{Error, fail};
use super::limits::Limits;
use super::objects::Object;

/// A value of a template.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// Jinja2's `Undefined`, with the message of the error that using it is.
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

/// Elements of a list or tuple, with the depth of the deepest one.
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

    /// Levels of containers in the deepest element.
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

/// A dictionary in the order in which it was written.
#[derive(Clone, Debug, Default)]
pub(super) struct Map {
    depth: usize,
    entries: Vec<(Value, Value)>,
    places: HashMap<Key, usize>,
}

/// A value as a key of a dictionary: what is equal in Python is equal here.
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
        match self.places.get(&hashed).and_then(|place| self.entries.get_mut(*place)) {
            Some(entry) => entry.1 = value,
            None => {
                self.places.insert(hashed, self.entries.len());
                self.entries.push((key, value));
            }
        }
        Ok(())
    }

    pub(super) fn insert_text(&mut self, name: &str, value: Value) {
        let name: Arc<str> = name.into();
        self.depth = self.depth.max(value.depth());
        match self.places.get(&Key::Text(name.clone())).and_then(|place| self.entries.get_mut(*place)) {
            Some(entry) => entry.1 = value,
            None => {
                self.places.insert(Key::Text(name.clone()), self.entries.len());
                self.entries.push((Value::Text(name), value));
            }
        }
    }

    pub(super) fn get(&self, key: &Key) -> Option<&Value> {
        self.places.get(key).and_then(|place| self.entries.get(*place)).map(|(_, value)| value)
    }

    pub(super) fn get_text(&self, name: &str) -> Option<&Value> {
        self.get(&Key::Text(name.into()))
    }

    /// Levels of containers in the deepest key or value.
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

    /// Takes the mark off a text.
    pub(super) fn plain(self) -> Self {
        match &self {
            Self::Object(object) => match &**object {
                Object::Markup(text) => Self::Text(text.clone()),
                _ => self,
            },
            _ => self,
        }
    }

    pub(super) fn count(number: usize) -> Self {
        Self::Int(i128::try_from(number).unwrap_or(i128::MAX))
    }

    /// Levels of containers: 0 for a plain value, 1 for a list of plain values.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::List(items) | Self::Tuple(items) => items.depth() + 1,
            Self::Map(map) => map.depth() + 1,
            Self::Object(object) => object.depth(),
            _ => 0,
        }
    }

    /// Undefined, because of `message`.
    pub(super) fn undefined(message: impl AsRef<str>) -> Self {
        Self::Undefined(message.as_ref().into())
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    pub(super) fn as_text(&self) -> Option<&str> {
        if let Self::Text(text) = self { Some(text) } else { None }
    }

    /// A whole number; booleans are numbers in Python.
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

    /// The name of its type in Python.
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

    /// Truth as Python has it.
    pub(super) fn truth(&self) -> bool {
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

    /// Returns the value as a key of a dictionary, and counts all that is hashed.
    pub(super) fn key(&self, limits: &mut Limits) -> Result<Key, Error> {
        self.key_within(limits, 0)
    }

    fn key_within(&self, limits: &mut Limits, depth: usize) -> Result<Key, Error> {
        limits.look(depth)?;
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
                limits.read(text.len())?;
                Key::Text(text.clone())
            }
            Self::Tuple(items) if depth < 16 => {
                limits.build_list(items.len())?;
                let keys = items.iter().map(|item| item.key_within(limits, depth + 1));
                Key::Tuple(keys.collect::<Result<_, _>>()?)
            }
            other => return fail(format!("unhashable type: '{}'", other.type_name())),
        })
    }

    /// A JSON value.
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
