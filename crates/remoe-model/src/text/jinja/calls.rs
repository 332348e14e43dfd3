//! Arguments of calls, and the functions of the environment.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::error::{Error, fail};
use super::machine::{Machine, set_attribute};
use super::objects::{Object, Range};
use super::print;
use super::value::{Items, Map, Value};

/// Items of a range, as Jinja2's sandbox allows.
const RANGE: usize = 100_000;

/// Bytes of the format of a date: each directive can write hundreds of bytes.
const DATE_FORMAT: usize = 1 << 10;

/// Arguments that a call was given.
#[derive(Debug, Default)]
pub(super) struct Given {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl Given {
    /// The arguments by the names of the parameters, of which the first `required` must be there.
    pub(super) fn bind<const N: usize>(
        self,
        function: &str,
        names: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N], Error> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            return fail(format!(
                "{function}() takes {N} arguments but {} were given",
                self.positional.len()
            ));
        }
        for (place, value) in bound.iter_mut().zip(self.positional) {
            *place = Some(value);
        }
        for (name, value) in self.named {
            let place = names.iter().zip(&mut bound).find(|(wanted, _)| **wanted == &*name);
            match place {
                Some((_, place @ None)) => *place = Some(value),
                Some(_) => return fail(format!("{function}() got multiple values for argument '{name}'")),
                None => return fail(format!("{function}() got an unexpected keyword argument '{name}'")),
            }
        }
        if let Some((name, _)) = names.iter().zip(&bound).take(required).find(|(_, value)| value.is_none()) {
            return fail(format!("{function}() missing a required argument: '{name}'"));
        }
        Ok(bound)
    }

    /// Refuses any arguments.
    pub(super) fn none(self, function: &str) -> Result<(), Error> {
        let [] = self.bind(function, [], 0)?;
        Ok(())
    }
}

/// A function of the environment.
pub(super) fn global(name: &str) -> Option<Value> {
    const FUNCTIONS: [&str; 9] = [
        "range",
        "dict",
        "namespace",
        "cycler",
        "joiner",
        "raise_exception",
        "strftime_now",
        "lipsum",
        "self",
    ];
    let name = FUNCTIONS.iter().find(|function| **function == name)?;
    Some(Value::object(Object::Function(name)))
}

impl Machine<'_> {
    pub(super) fn call_function(&mut self, name: &str, given: Given) -> Result<Value, Error> {
        match name {
            "range" => self.range(given),
            "dict" => Ok(Value::map(self.dictionary("dict", given)?)),
            "namespace" => {
                let map = self.dictionary("namespace", given)?;
                let mut values = Map::default();
                for (name, value) in map.entries() {
                    self.limits.keep(value, 1)?;
                    if let Value::Text(name) = name {
                        set_attribute(&mut values, name, value.clone())?;
                    }
                }
                Ok(Value::object(Object::Namespace(RefCell::new(values))))
            }
            "cycler" => {
                if given.positional.is_empty() || !given.named.is_empty() {
                    return fail("at least one item has to be provided");
                }
                Ok(Value::object(Object::Cycler(Items::new(given.positional), Cell::new(0))))
            }
            "joiner" => {
                let [separator] = given.bind("joiner", ["sep"], 0)?;
                let separator = separator.unwrap_or_else(|| Value::text(", "));
                Ok(Value::object(Object::Joiner(separator, Cell::new(false))))
            }
            "raise_exception" => {
                let [message] = given.bind("raise_exception", ["message"], 1)?;
                let message = print::text(&mut self.limits, &message.unwrap_or(Value::None))?;
                Err(Error::raised(message))
            }
            "strftime_now" => {
                let [format] = given.bind("strftime_now", ["format"], 1)?;
                let Some(Value::Text(format)) = format else {
                    return fail("strftime() argument 1 must be str");
                };
                if format.len() > DATE_FORMAT {
                    return fail(format!("strftime_now: the format is longer than {DATE_FORMAT} bytes"));
                }
                let date = jiff::fmt::strtime::format(&*format, &jiff::Zoned::now())
                    .map_err(|error| Error::new(format!("strftime_now({format:?}): {error}")))?;
                self.limits.build(date.len())?;
                Ok(Value::Text(date.into()))
            }
            other => fail(format!("'{other}' writes text by chance, which a prompt must not have")),
        }
    }

    fn range(&mut self, given: Given) -> Result<Value, Error> {
        if !given.named.is_empty() {
            return fail("range() takes no keyword arguments");
        }
        let mut numbers = Vec::new();
        for argument in &given.positional {
            match argument.as_int() {
                Some(number) => numbers.push(number),
                None => {
                    let name = argument.type_name();
                    return fail(format!("'{name}' object cannot be interpreted as an integer"));
                }
            }
        }
        let (start, stop, step) = match numbers.as_slice() {
            [stop] => (0, *stop, 1),
            [start, stop] => (*start, *stop, 1),
            [_, _, 0] => return fail("range() arg 3 must not be zero"),
            [start, stop, step] => (*start, *stop, *step),
            _ => return fail(format!("range expected 1 to 3 arguments, got {}", numbers.len())),
        };
        let distance = if step > 0 { stop.checked_sub(start) } else { start.checked_sub(stop) };
        let steps = distance.and_then(|distance| {
            let size = step.checked_abs()?;
            distance.max(0).checked_add(size - 1)?.checked_div(size)
        });
        match steps.and_then(|steps| usize::try_from(steps).ok()).filter(|length| *length <= RANGE) {
            Some(length) => Ok(Value::object(Object::Range(Range { start, stop, step, length }))),
            None => {
                fail(format!("Range too big. The sandbox blocks ranges larger than MAX_RANGE ({RANGE})."))
            }
        }
    }

    /// `dict(..)` of a dictionary, of pairs and of named values.
    fn dictionary(&mut self, function: &str, given: Given) -> Result<Map, Error> {
        let mut map = Map::default();
        let mut positional = given.positional.into_iter();
        match positional.next() {
            None => (),
            Some(Value::Map(of)) => {
                for (key, value) in of.entries() {
                    map.insert(&mut self.limits, key.clone(), value.clone())?;
                }
            }
            Some(pairs) => {
                for pair in &*self.iterate(&pairs)? {
                    match self.iterate(pair)?.as_slice() {
                        [key, value] => map.insert(&mut self.limits, key.clone(), value.clone())?,
                        _ => return fail("dictionary update sequence: expected pairs"),
                    }
                }
            }
        }
        if positional.next().is_some() {
            return fail(format!("{function} expected at most 1 argument"));
        }
        for (name, value) in given.named {
            map.insert_text(&name, value);
        }
        self.limits.build_list(map.len())?;
        Ok(map)
    }

    /// `dict.fromkeys(keys, value)`.
    pub(super) fn keyed(&mut self, given: Given) -> Result<Value, Error> {
        let [keys, value] = given.bind("fromkeys", ["iterable", "value"], 1)?;
        let value = value.unwrap_or(Value::None);
        let mut map = Map::default();
        for key in &*self.iterate(&keys.unwrap_or(Value::None))? {
            map.insert(&mut self.limits, key.clone(), value.clone())?;
        }
        self.limits.build_list(map.len())?;
        Ok(Value::map(map))
    }
}
