//! Arguments of calls, and the functions of the environment.

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use super::error::{Error, fail};
use super::objects::{Object, RangeObject};
use super::python_text;
use super::renderer::{Renderer, set_attribute};
use super::value::{Items, Map, Value};

/// Most items of a range, as in Jinja2's sandbox.
const MAX_RANGE_ITEMS: usize = 100_000;

/// Longest format of a date in bytes; each directive can expand to hundreds of bytes.
const MAX_DATE_FORMAT_BYTES: usize = 1 << 10;

/// Evaluated arguments of a call.
#[derive(Debug, Default)]
pub(super) struct CallArguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(Arc<str>, Value)>,
}

impl CallArguments {
    /// Assigns the arguments to the parameters `names`, of which the first `required` must be present.
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
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            let slot = names.iter().zip(&mut bound).find(|(wanted, _)| **wanted == &*name);
            match slot {
                Some((_, slot @ None)) => *slot = Some(value),
                Some(_) => return fail(format!("{function}() got multiple values for argument '{name}'")),
                None => return fail(format!("{function}() got an unexpected keyword argument '{name}'")),
            }
        }
        if let Some((name, _)) = names.iter().zip(&bound).take(required).find(|(_, value)| value.is_none()) {
            return fail(format!("{function}() missing a required argument: '{name}'"));
        }
        Ok(bound)
    }

    /// Fails if there are any arguments.
    pub(super) fn expect_none(self, function: &str) -> Result<(), Error> {
        let [] = self.bind(function, [], 0)?;
        Ok(())
    }
}

/// Returns the function of the environment with this name.
pub(super) fn global_function(name: &str) -> Option<Value> {
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

impl Renderer<'_> {
    pub(super) fn call_function(&mut self, name: &str, args: CallArguments) -> Result<Value, Error> {
        match name {
            "range" => self.range(args),
            "dict" => Ok(Value::map(self.build_dict("dict", args)?)),
            "namespace" => {
                let map = self.build_dict("namespace", args)?;
                let mut values = Map::default();
                for (name, value) in map.entries() {
                    self.limits.check_stored(value, 1)?;
                    if let Value::Text(name) = name {
                        set_attribute(&mut values, name, value.clone())?;
                    }
                }
                Ok(Value::object(Object::Namespace(RefCell::new(values))))
            }
            "cycler" => {
                if args.positional.is_empty() || !args.named.is_empty() {
                    return fail("at least one item has to be provided");
                }
                Ok(Value::object(Object::Cycler(Items::new(args.positional), Cell::new(0))))
            }
            "joiner" => {
                let [separator] = args.bind("joiner", ["sep"], 0)?;
                let separator = separator.unwrap_or_else(|| Value::text(", "));
                Ok(Value::object(Object::Joiner(separator, Cell::new(false))))
            }
            "raise_exception" => {
                let [message] = args.bind("raise_exception", ["message"], 1)?;
                let message = python_text::to_str(&mut self.limits, &message.unwrap_or(Value::None))?;
                Err(Error::raised(message))
            }
            "strftime_now" => {
                let [format] = args.bind("strftime_now", ["format"], 1)?;
                let Some(Value::Text(format)) = format else {
                    return fail("strftime() argument 1 must be str");
                };
                if format.len() > MAX_DATE_FORMAT_BYTES {
                    return fail(format!(
                        "strftime_now: the format is longer than {MAX_DATE_FORMAT_BYTES} bytes"
                    ));
                }
                let date = jiff::fmt::strtime::format(&*format, &jiff::Zoned::now())
                    .map_err(|error| Error::new(format!("strftime_now({format:?}): {error}")))?;
                self.limits.charge_text(date.len())?;
                Ok(Value::Text(date.into()))
            }
            other => fail(format!("'{other}' writes text by chance, which a prompt must not have")),
        }
    }

    fn range(&mut self, args: CallArguments) -> Result<Value, Error> {
        if !args.named.is_empty() {
            return fail("range() takes no keyword arguments");
        }
        let mut numbers = Vec::new();
        for argument in &args.positional {
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
        match steps.and_then(|steps| usize::try_from(steps).ok()).filter(|length| *length <= MAX_RANGE_ITEMS)
        {
            Some(length) => Ok(Value::object(Object::Range(RangeObject { start, stop, step, length }))),
            None => fail(format!(
                "Range too big. The sandbox blocks ranges larger than MAX_RANGE ({MAX_RANGE_ITEMS})."
            )),
        }
    }

    /// Builds the dictionary of `dict(..)`: from a dictionary or pairs, and from keyword arguments.
    fn build_dict(&mut self, function: &str, args: CallArguments) -> Result<Map, Error> {
        let mut map = Map::default();
        let mut positional = args.positional.into_iter();
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
        for (name, value) in args.named {
            map.insert_text(&name, value);
        }
        self.limits.charge_list(map.len())?;
        Ok(map)
    }

    /// Evaluates `dict.fromkeys(keys, value)`.
    pub(super) fn dict_from_keys(&mut self, args: CallArguments) -> Result<Value, Error> {
        let [keys, value] = args.bind("fromkeys", ["iterable", "value"], 1)?;
        let value = value.unwrap_or(Value::None);
        let mut map = Map::default();
        for key in &*self.iterate(&keys.unwrap_or(Value::None))? {
            map.insert(&mut self.limits, key.clone(), value.clone())?;
        }
        self.limits.charge_list(map.len())?;
        Ok(Value::map(map))
    }
}
