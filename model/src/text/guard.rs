//! What a rendering may build: every text and list is counted before it is there.

use std::sync::LazyLock;

use minijinja::value::{Kwargs, ObjectRepr, Rest, Tuple};
use minijinja::{Environment, Error, ErrorKind, Expression, State, Value};

/// Bytes of a rendered text, of any text on the way to it, and of the values that one rendering writes,
/// into macros and blocks that it keeps too. Bodies of requests are a few MiB.
pub(super) const OUTPUT: usize = 32 << 20;
/// Bytes of all texts and lists that one rendering builds.
const BUILT: usize = 512 << 20;
/// Elements of a list.
const ITEMS: usize = 1 << 20;
/// Bytes that an element of a list is counted as.
const ITEM: usize = 8;
/// Nesting of lists and objects.
const DEPTH: usize = 200;
/// Elements that are looked at for their size, all together.
const LOOKS: usize = 20_000_000;
/// Bytes of texts that are searched, compared and measured, all together: steps are counted elsewhere, but one
/// step may go over a whole text.
const READ: usize = 1 << 30;
/// Bytes that a piece of a text takes in a list.
const PIECE: usize = 32;
/// Elements of one value that is written as text.
const WRITTEN: usize = 2 << 20;

// No template can write these names.
pub(super) const KEEP: &str = "\0keep";
pub(super) const ADD: &str = "\0+";
pub(super) const MUL: &str = "\0*";
pub(super) const CONCAT: &str = "\0~";
pub(super) const EQ: &str = "\0==";
pub(super) const NE: &str = "\0!=";
pub(super) const LT: &str = "\0<";
pub(super) const LTE: &str = "\0<=";
pub(super) const GT: &str = "\0>";
pub(super) const GTE: &str = "\0>=";
pub(super) const IN: &str = "\0in";

/// Filters of the engine that make texts or lists, or go over them. They are called by way of [`filtered`].
const FILTERS: [&str; 39] = [
    "batch",
    "capitalize",
    "count",
    "dictsort",
    "e",
    "escape",
    "first",
    "format",
    "groupby",
    "indent",
    "items",
    "join",
    "last",
    "length",
    "lines",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "sort",
    "split",
    "string",
    "sum",
    "title",
    "trim",
    "unique",
    "upper",
    "urlencode",
    "zip",
    "attr",
];

/// What one rendering has built and looked at.
#[derive(Default)]
struct Spent {
    built: usize,
    looks: usize,
    read: usize,
}

/// The engine without guards: what they call in the end.
static PLAIN: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut plain = Environment::new();
    plain.set_unknown_method_callback(call_method);
    plain
});

/// Puts `environment` under guard.
pub(super) fn install(environment: &mut Environment<'static>) {
    // Not in Jinja, and what it gives still depends on what it was made of.
    environment.remove_filter("chain");
    // Prints all that there is.
    environment.remove_global("debug");
    for name in FILTERS {
        environment.add_filter(name, move |state: &mut State, arguments: Rest<Value>, named: Kwargs| {
            let Rest(mut arguments) = arguments;
            if named.args().next().is_some() {
                arguments.push(Value::from(named));
            }
            filtered(state, name, &arguments)
        });
    }
    environment.set_unknown_method_callback(call_method);
    environment.add_function(KEEP, keep);
    environment.add_function(ADD, add);
    environment.add_function(MUL, multiply);
    environment.add_function(CONCAT, concat);
    environment.add_function(IN, |state: &mut State, item: &Value, list: &Value| {
        if item.as_object().is_some() {
            look(state, item)?;
            look(state, list)?;
        }
        read(state, length(list))?;
        operate("a in b", item, list)
    });
    for (name, holds) in COMPARISONS {
        environment.add_function(name, move |state: &mut State, a: &Value, b: &Value| {
            if a.as_object().is_some() && b.as_object().is_some() {
                look(state, a)?;
                look(state, b)?;
            }
            read(state, length(a).min(length(b)))?;
            Ok::<_, Error>(holds(a, b))
        });
    }
}

type Holds = fn(&Value, &Value) -> bool;

const COMPARISONS: [(&str, Holds); 6] = [
    (EQ, |a, b| a == b),
    (NE, |a, b| a != b),
    (LT, |a, b| a < b),
    (LTE, |a, b| a <= b),
    (GT, |a, b| a > b),
    (GTE, |a, b| a >= b),
];

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

/// Counts a text or list of `bytes` that is about to be built.
///
/// # Errors
/// It is too long, or too much was built.
pub(super) fn build(state: &mut State, bytes: usize) -> Result<(), Error> {
    if bytes > OUTPUT {
        return Err(refused(format!("a text or list would be longer than {OUTPUT} bytes")));
    }
    let spent = state.get_or_insert_extension(Spent::default());
    spent.built = spent.built.saturating_add(bytes);
    if spent.built > BUILT {
        return Err(refused(format!("all texts and lists together are longer than {BUILT} bytes")));
    }
    Ok(())
}

/// Bytes of a text, 0 of anything else.
fn length(value: &Value) -> usize {
    value.as_str().map_or(0, str::len)
}

/// Counts `bytes` of text that are about to be gone over.
///
/// # Errors
/// Too much was.
fn read(state: &mut State, bytes: usize) -> Result<(), Error> {
    let spent = state.get_or_insert_extension(Spent::default());
    spent.read = spent.read.saturating_add(bytes);
    if spent.read > READ {
        return Err(refused(format!("more than {READ} bytes of texts are searched, compared or measured")));
    }
    Ok(())
}

/// The size of a value, as text.
#[derive(Clone, Copy, Default)]
pub(super) struct Size {
    /// Bytes, roughly where it holds more than text.
    pub(super) bytes: usize,
    elements: usize,
}

/// Looks through a value.
///
/// # Errors
/// It is nested too deeply, or too much was looked at.
fn look(state: &mut State, value: &Value) -> Result<Size, Error> {
    look_at_most(state, value, LOOKS, &mut |_| Ok(()))
}

/// Looks through a value of at most `most` elements with `seen`.
fn look_at_most(
    state: &mut State,
    value: &Value,
    most: usize,
    seen: &mut dyn FnMut(&Value) -> Result<(), Error>,
) -> Result<Size, Error> {
    let spent = state.get_or_insert_extension(Spent::default());
    let mut size = Size::default();
    let result = walk(value, 0, most.min(LOOKS.saturating_sub(spent.looks)), &mut size, seen);
    spent.looks = spent.looks.saturating_add(size.elements);
    result.map(|()| size)
}

/// As [`look`], for a value that is to be written.
///
/// # Errors
/// As [`look`], and where it has too many elements.
pub(super) fn look_to_write(state: &mut State, value: &Value) -> Result<Size, Error> {
    let size = look_at_most(state, value, WRITTEN, &mut |_| Ok(()))?;
    if size.bytes > OUTPUT {
        return Err(refused(format!("a text would be longer than {OUTPUT} bytes")));
    }
    Ok(size)
}

fn walk(
    value: &Value,
    depth: usize,
    most: usize,
    size: &mut Size,
    seen: &mut dyn FnMut(&Value) -> Result<(), Error>,
) -> Result<(), Error> {
    seen(value)?;
    size.elements += 1;
    if size.elements > most {
        return Err(refused("too many elements are compared, sorted or written"));
    }
    size.bytes = size.bytes.saturating_add(value.as_str().map_or(ITEM, str::len));
    let Some(object) = value.as_object() else {
        return Ok(());
    };
    if depth == DEPTH {
        return Err(refused(format!("lists or objects are nested deeper than {DEPTH} levels")));
    }
    match object.repr() {
        ObjectRepr::Map => {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                walk(&key, depth + 1, most, size, seen)?;
                walk(&value, depth + 1, most, size, seen)?;
            }
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            for value in object.try_iter().into_iter().flatten() {
                walk(&value, depth + 1, most, size, seen)?;
            }
        }
        _ => (),
    }
    Ok(())
}

/// Lets a value pass that goes into a namespace: neither too deep nor with a namespace in it.
fn keep(state: &mut State, value: Value) -> Result<Value, Error> {
    if value.as_object().is_some() {
        let mut no_namespace = |value: &Value| match value.as_object() {
            Some(object) if object.type_name().ends_with("::Namespace") => {
                Err(refused("a namespace cannot be put into a namespace"))
            }
            _ => Ok(()),
        };
        look_at_most(state, &value, LOOKS, &mut no_namespace)?;
    }
    Ok(value)
}

/// The engine's own operators.
fn operate(operator: &str, a: &Value, b: &Value) -> Result<Value, Error> {
    static OPERATORS: LazyLock<Vec<(&str, Expression<'static, 'static>)>> = LazyLock::new(|| {
        let compiled = |source| Some((source, PLAIN.compile_expression(source).ok()?));
        ["a + b", "a * b", "a in b"].into_iter().filter_map(compiled).collect()
    });
    let operation = OPERATORS.iter().find(|(source, _)| *source == operator);
    let (_, operation) = operation.ok_or_else(|| refused(format!("unknown operator {operator}")))?;
    let operands = Value::from_pairs([("a", a.clone()), ("b", b.clone())]);
    // Its place is that of the guard's call, not of this expression.
    operation
        .eval(operands)
        .map_err(|error| Error::new(error.kind(), error.detail().unwrap_or_default().to_owned()))
}

/// Elements of a list, where it is no more than may be.
fn items(value: &Value) -> Result<usize, Error> {
    let items = match value.len() {
        Some(items) => items,
        None => value.try_iter()?.take(ITEMS + 1).count(),
    };
    if items > ITEMS {
        Err(refused(format!("a list would have more than {ITEMS} elements")))
    } else {
        Ok(items)
    }
}

fn add(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    match (a.as_str(), b.as_str()) {
        (Some(left), Some(right)) => build(state, left.len() + right.len())?,
        _ if a.as_object().is_some() && b.as_object().is_some() => {
            let items = items(a)? + items(b)?;
            build(state, items.min(ITEMS + 1).saturating_mul(ITEM))?;
            if items > ITEMS {
                return Err(refused(format!("a list would have more than {ITEMS} elements")));
            }
        }
        _ => (),
    }
    operate("a + b", a, b)
}

fn multiply(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    let length = |value: &Value| match value.as_str() {
        Some(text) => Ok(Some(text.len())),
        None if value.as_object().is_some() => items(value).map(|items| Some(items.saturating_mul(ITEM))),
        None => Ok(None),
    };
    if let Some((length, times)) = length(a)?.zip(b.as_usize()).or(length(b)?.zip(a.as_usize())) {
        build(state, length.saturating_mul(times))?;
    }
    operate("a * b", a, b)
}

fn concat(state: &mut State, a: &Value, b: &Value) -> Result<Value, Error> {
    let size = look_to_write(state, a)?.bytes + look_to_write(state, b)?.bytes;
    build(state, size)?;
    Ok(Value::from(format!("{a}{b}")))
}

/// A filter of the engine, its arguments and its result counted.
fn filtered(state: &mut State, name: &str, arguments: &[Value]) -> Result<Value, Error> {
    let text = |index: usize| arguments.get(index).and_then(Value::as_str).unwrap_or_default();
    let number = |index: usize| arguments.get(index).and_then(Value::as_usize).unwrap_or(0);
    read(state, arguments.iter().map(length).sum())?;
    match name {
        "join" => check_join(state, arguments.first(), text(1).len())?,
        "replace" => check_replace(state, text(0), text(1), text(2))?,
        "indent" => {
            // The width may have a name, and may be a text.
            let named = arguments.iter().filter_map(|value| value.get_attr("width").ok());
            let widths = named.chain(arguments.get(1).cloned());
            let width = |width: Value| width.as_usize().unwrap_or(width.as_str().map_or(0, str::len));
            let width = widths.map(width).max().unwrap_or(0);
            let lines = text(0).lines().count() + 1;
            build(state, lines.saturating_mul(width).saturating_add(text(0).len()))?;
        }
        "list" | "split" | "lines" => {
            let pieces = match (name, text(1)) {
                ("list", _) => text(0).chars().count(),
                ("split", separator) if !separator.is_empty() => text(0).matches(separator).count() + 1,
                _ => text(0).split_whitespace().count().max(text(0).lines().count()),
            };
            build(state, pieces.saturating_mul(PIECE))?;
        }
        "batch" | "slice" => build(state, number(1).saturating_mul(ITEM))?,
        "format" => check_format(state, text(0), arguments)?,
        // Filters by name are called here, under guard.
        "map" if arguments.get(1).is_some_and(|filter| filter.as_str().is_some()) => {
            let (filter, more) = (text(1), arguments.get(2..).unwrap_or_default());
            let mut mapped = Vec::new();
            for item in arguments.first().into_iter().flat_map(Value::try_iter).flatten() {
                mapped.push(state.apply_filter(filter, &[&[item], more].concat())?);
                if mapped.len() > ITEMS {
                    return Err(refused(format!("a list would have more than {ITEMS} elements")));
                }
            }
            return built(state, Value::from(mapped));
        }
        // They compare with a list or an object.
        "select" | "selectattr" | "reject" | "rejectattr"
            if arguments.iter().skip(2).any(|argument| argument.as_object().is_some()) =>
        {
            for argument in arguments {
                look(state, argument)?;
            }
        }
        "string" | "pprint" | "sort" | "unique" | "dictsort" | "groupby" | "min" | "max" | "sum"
        | "escape" | "e" | "urlencode" => {
            for argument in arguments {
                look_to_write(state, argument)?;
            }
        }
        _ => (),
    }
    let mut plain = PLAIN.empty_state();
    let result = plain.apply_filter(name, arguments);
    let result =
        result.map_err(|error| Error::new(error.kind(), error.detail().unwrap_or_default().to_owned()))?;
    built(state, result)
}

/// Counts a value that was built.
fn built(state: &mut State, value: Value) -> Result<Value, Error> {
    let bytes = match value.as_str() {
        Some(text) => text.len(),
        None => value.len().unwrap_or(0).saturating_mul(ITEM),
    };
    build(state, bytes)?;
    Ok(value)
}

fn check_join(state: &mut State, list: Option<&Value>, between: usize) -> Result<(), Error> {
    let Some(list) = list else {
        return Ok(());
    };
    let size = look_to_write(state, list)?;
    // Characters of a text are joined, too.
    let pieces = list.as_str().map_or(size.elements, str::len);
    build(state, pieces.saturating_mul(between).saturating_add(size.bytes))
}

fn check_replace(state: &mut State, text: &str, old: &str, new: &str) -> Result<(), Error> {
    let found = if new.len() > old.len() { text.matches(old).count() } else { 0 };
    build(state, found.saturating_mul(new.len()).saturating_add(text.len()))
}

/// Widths in a format are numbers of some digits, not asterisks or other values.
fn check_format(state: &mut State, format: &str, arguments: &[Value]) -> Result<(), Error> {
    let digits = format.split(|c: char| !c.is_ascii_digit()).map(str::len).max().unwrap_or(0);
    let nested = format.split('{').skip(1).any(|part| part.contains(':') && !part.contains('}'));
    if digits > 4 || nested || format.contains('*') {
        return Err(refused("expected format widths of at most 4 digits"));
    }
    let fields = format.matches(['%', '{']).count();
    let mut bytes = format.len().saturating_add(fields.saturating_mul(10_000));
    for argument in arguments {
        let size = look_to_write(state, argument)?.bytes;
        // Each field may name the same argument.
        bytes = bytes.saturating_add(size.saturating_mul(fields.max(1)));
    }
    build(state, bytes)
}

/// Methods of Python's texts, lists and objects, their results counted.
fn call_method(state: &mut State, value: &Value, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let text = |index: usize| arguments.get(index).and_then(Value::as_str).unwrap_or_default();
    if let Some(object) = value.as_object().filter(|object| object.repr() == ObjectRepr::Map) {
        // Lists of their own, not views: what is put into a namespace stays as it is.
        let pairs = || object.try_iter_pairs().into_iter().flatten();
        let list = match method {
            _ if !arguments.is_empty() => None,
            "keys" => Some(pairs().map(|(key, _)| key).collect()),
            "values" => Some(pairs().map(|(_, value)| value).collect()),
            "items" => Some(pairs().map(|(key, value)| Value::from(Tuple::from([key, value]))).collect()),
            _ => None,
        };
        if let Some(list) = list {
            return built(state, list);
        }
    }
    read(state, arguments.iter().map(length).sum::<usize>().saturating_add(length(value)))?;
    match (method, value.as_str()) {
        ("split" | "rsplit" | "splitlines", Some(whole)) => {
            let pieces = match text(0) {
                "" => whole.split_whitespace().count().max(whole.lines().count()),
                separator => whole.matches(separator).count() + 1,
            };
            build(state, pieces.saturating_mul(PIECE))?;
        }
        ("join", Some(between)) => check_join(state, arguments.first(), between.len())?,
        ("replace", Some(old)) => check_replace(state, old, text(0), text(1))?,
        ("format", Some(format)) => check_format(state, format, arguments)?,
        _ => (),
    }
    let result = minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments)?;
    built(state, result)
}
