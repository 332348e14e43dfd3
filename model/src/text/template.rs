//! Chat templates, rendered as transformers 5.17 renders them (`utils/chat_template_utils.py`).

use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use minijinja::machinery::{CompiledTemplate, TemplateConfig, Token, eval, make_string_output, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};
use serde_json::{Map, Value as Json};

use crate::error::{CheckpointError, MESSAGE_BYTES, shown};
use crate::fields::Fields;
use crate::json;
use crate::store::{Folder, Store};
use crate::text::error::TextError;
use crate::text::guard::{self, OUTPUT};
use crate::text::instrument::guarded;
use crate::text::python_json::{self, Style};

/// Instructions that one rendering may take: a thousand messages take some hundred thousand.
const FUEL: u64 = 2_000_000;
/// Nesting of macros and includes.
const RECURSION: usize = 100;
/// Bytes of a template.
const SOURCE: usize = 1 << 20;
/// Multiplications in a template. The engine computes constants while it compiles; each may become a text
/// of 100 MB.
const MULTIPLICATIONS: usize = 32;
/// Tokens between the braces of one tag: the engine goes down a chain of operators by recursion, however
/// deep the stack is.
const TAG: usize = 1024;
/// Stack of a rendering. Straight on, a template can nest lists as deeply as it is long; they are
/// printed, compared and dropped level by level. Only what is used of it takes memory.
const STACK: usize = 256 << 20;
/// Bytes of what stands between the parts of JSON.
const SEPARATOR: usize = 64;
const NAME: &str = "chat_template";

const CONFIG: &str = "tokenizer_config.json";
const JINJA: &str = "chat_template.jinja";
const LEGACY: &str = "chat_template.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";

/// The special tokens that a template can name.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// A model's chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    path: PathBuf,
    source: String,
    syntax: SyntaxConfig,
    environment: Environment<'static>,
    special_tokens: BTreeMap<&'static str, String>,
}

/// What a conversation is rendered with beside its messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rendering<'a> {
    /// The tools that the model may call, as OpenAI's requests have them.
    pub tools: Option<&'a [Json]>,
    /// How much the model is to think, as `reasoning_effort` of OpenAI's requests; the template knows of none where absent.
    pub reasoning_effort: Option<&'a str>,
    /// Further variables, as `chat_template_kwargs` of requests.
    pub kwargs: Option<&'a Map<String, Json>>,
    /// Opens the assistant's answer.
    pub add_generation_prompt: bool,
}

/// What `raise_exception` carries out of a rendering.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

impl ChatTemplate {
    /// Opens the template of a folder, `None` where there is none: `chat_template.jinja`, else
    /// `chat_template` of `tokenizer_config.json` (one template, or a list of which the one named
    /// `default` is taken), else `chat_template.json`.
    ///
    /// # Errors
    /// A file cannot be read, or the template is broken.
    pub fn open(folder: impl AsRef<Path>) -> Result<Option<Self>, TextError> {
        Self::open_in(&Folder::new(folder.as_ref()))
    }

    /// As [`Self::open`], from any store.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(store: &dyn Store) -> Result<Option<Self>, TextError> {
        let config_path = store.root().join(CONFIG);
        let config = json::object_if_present(store, CONFIG)?.unwrap_or_default();
        let special_tokens = special_tokens(store, &config_path, &config)?;
        let jinja = store.root().join(JINJA);
        if let Some(bytes) = json::read_optional(store, JINJA)? {
            let source = String::from_utf8(bytes)
                .map_err(|error| TextError::Template { path: jinja.clone(), message: error.to_string() })?;
            return Self::new(&jinja, &source, special_tokens).map(Some);
        }
        if let Some(source) = named_template(&config_path, &config)? {
            return Self::new(&config_path, source, special_tokens).map(Some);
        }
        let legacy = store.root().join(LEGACY);
        if let Some(object) = json::object_if_present(store, LEGACY)?
            && let Some(source) = named_template(&legacy, &object)?
        {
            return Self::new(&legacy, source, special_tokens).map(Some);
        }
        Ok(None)
    }

    fn new(
        path: &Path,
        source: &str,
        special_tokens: BTreeMap<&'static str, String>,
    ) -> Result<Self, TextError> {
        let broken = |message: String| TextError::Template { path: path.to_owned(), message };
        if source.len() > SOURCE {
            return Err(broken(format!("longer than {SOURCE} bytes")));
        }
        let source = without_generation_tags(source);
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build()
            .map_err(|error| broken(describe(&error)))?;
        environment.set_fuel(Some(FUEL));
        environment.set_recursion_limit(RECURSION);
        environment.set_formatter(write_within_bounds);
        guard::install(&mut environment);
        environment.add_filter("tojson", to_json);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        let tokens = tokenize(&source, false, syntax.clone()).take_while(Result::is_ok);
        if tokens.filter(|token| matches!(token, Ok((Token::Mul, _)))).count() > MULTIPLICATIONS {
            return Err(broken(format!("more than {MULTIPLICATIONS} multiplications")));
        }
        if longest_tag(tokenize(&source, false, syntax.clone()).map_while(Result::ok)) > TAG {
            return Err(broken(format!("a tag with more than {TAG} tokens")));
        }
        let template = Self { path: path.to_owned(), source, syntax, environment, special_tokens };
        template.compiled().map_err(|error| broken(describe(&error)))?;
        Ok(template)
    }

    /// The instructions, under guard.
    fn compiled(&self) -> Result<CompiledTemplate<'_>, Error> {
        let config = TemplateConfig {
            syntax_config: self.syntax.clone(),
            default_auto_escape: Arc::new(|_| AutoEscape::None),
        };
        let mut compiled = CompiledTemplate::new(NAME, &self.source, &config)?;
        let unknown = || Error::new(ErrorKind::SyntaxError, "unsupported assignment to an attribute");
        compiled.instructions = guarded(&compiled.instructions).ok_or_else(unknown)?;
        for instructions in compiled.blocks.values_mut() {
            *instructions = guarded(instructions).ok_or_else(unknown)?;
        }
        Ok(compiled)
    }

    /// Whether the template reads the variable `name`.
    #[must_use]
    pub fn reads(&self, name: &str) -> bool {
        self.source.contains(name)
    }

    /// The template's text.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The text of a conversation. `messages` are objects with `role` and `content` and whatever
    /// else the template knows; `add_generation_prompt` opens the assistant's answer.
    ///
    /// The text holds the special tokens, encode it without adding any.
    ///
    /// # Errors
    /// [`TextError::Refused`] where the template refuses the conversation, [`TextError::Template`]
    /// where the template fails.
    pub fn render(&self, messages: &[Json], add_generation_prompt: bool) -> Result<String, TextError> {
        self.render_with(messages, Rendering { add_generation_prompt, ..Rendering::default() })
    }

    /// As [`Self::render`], with all that a request can say.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub fn render_with(&self, messages: &[Json], rendering: Rendering<'_>) -> Result<String, TextError> {
        let Rendering { tools, reasoning_effort, kwargs, add_generation_prompt } = rendering;
        let mut context: BTreeMap<&str, Value> =
            self.special_tokens.iter().map(|(name, token)| (*name, Value::from(token.as_str()))).collect();
        context.insert("messages", Value::from(Serde(messages)));
        context.insert("add_generation_prompt", Value::from(add_generation_prompt));
        context.insert("tools", tools.map_or_else(|| Value::from(()), |tools| Value::from(Serde(tools))));
        context.insert("documents", Value::from(()));
        for (name, value) in kwargs.into_iter().flatten() {
            context.insert(name.as_str(), Value::from(Serde(value)));
        }
        if let Some(effort) = reasoning_effort {
            context.insert("reasoning_effort", Value::from(effort));
        }
        let render = || -> Result<String, Error> {
            let compiled = self.compiled()?;
            let mut text = String::new();
            let mut output = make_string_output(&mut text);
            let context = Value::from_pairs(context);
            let (instructions, blocks) = (&compiled.instructions, &compiled.blocks);
            // The state goes here, with all that the template has built.
            drop(eval(&self.environment, instructions, context, blocks, &mut output, AutoEscape::None)?);
            Ok(text)
        };
        let failed = |message| TextError::Template { path: self.path.clone(), message };
        let rendered = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || {
                render().map_err(|error| match raised(&error) {
                    Some(message) => TextError::Refused(shown(message, MESSAGE_BYTES)),
                    None => failed(describe(&error)),
                })
            });
            thread.map(|thread| thread.join())
        });
        match rendered {
            Ok(Ok(rendered)) => rendered,
            Ok(Err(_panic)) => Err(failed("rendering it crashed".to_owned())),
            Err(error) => Err(failed(format!("cannot start a thread to render it: {error}"))),
        }
    }
}

fn too_long() -> String {
    format!("the text would be longer than {OUTPUT} bytes")
}

/// Bytes of values that a rendering has written, wherever to.
#[derive(Default)]
struct Written(usize);

/// What would be written, without writing it.
struct Length(usize);

impl fmt::Write for Length {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0 += text.len();
        if self.0 > OUTPUT { Err(fmt::Error) } else { Ok(()) }
    }
}

fn write_within_bounds(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let length = match value.as_str() {
        Some(text) => text.len(),
        None => {
            guard::look_to_write(state, value)?;
            let mut length = Length(0);
            // The length says whether it was too much.
            let _too_much = write!(length, "{value}");
            length.0
        }
    };
    let written = state.get_or_insert_extension(Written::default());
    written.0 = written.0.saturating_add(length);
    if written.0 > OUTPUT {
        return Err(Error::new(ErrorKind::WriteFailure, too_long()));
    }
    minijinja::escape_formatter(out, state, value)
}

/// The template in a config: a string, or a list of {name, template}.
fn named_template<'a>(
    path: &'a Path,
    object: &'a Map<String, Json>,
) -> Result<Option<&'a str>, CheckpointError> {
    let fields = Fields::new(path, object);
    match fields.get(NAME) {
        None => Ok(None),
        Some(Json::String(source)) => Ok(Some(source)),
        Some(Json::Array(list)) => list
            .iter()
            .find(|entry| entry.get("name").and_then(Json::as_str) == Some("default"))
            .and_then(|entry| entry.get("template").and_then(Json::as_str))
            .map(Some)
            .ok_or_else(|| fields.error(NAME, "is a list, expected one template named `default` in it")),
        Some(_) => Err(fields.error(NAME, "expected a string or a list of named templates")),
    }
}

/// Special tokens of `tokenizer_config.json`, else of `special_tokens_map.json`; each is a string or
/// an object with `content`.
fn special_tokens(
    store: &dyn Store,
    config_path: &Path,
    config: &Map<String, Json>,
) -> Result<BTreeMap<&'static str, String>, CheckpointError> {
    let map_path = store.root().join(SPECIAL_TOKENS_MAP);
    let map = json::object_if_present(store, SPECIAL_TOKENS_MAP)?.unwrap_or_default();
    let mut tokens = BTreeMap::new();
    for name in SPECIAL_TOKENS {
        for (path, object) in [(config_path, config), (&map_path, &map)] {
            let fields = Fields::new(path, object);
            let token = match fields.get(name) {
                None => continue,
                Some(Json::String(token)) => token,
                Some(other) => match other.get("content") {
                    Some(Json::String(token)) => token,
                    _ => {
                        return Err(fields.error(name, "expected a string or an object with `content`"));
                    }
                },
            };
            tokens.entry(name).or_insert_with(|| token.clone());
        }
    }
    Ok(tokens)
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message.clone()).with_source(Raised(message)))
}

fn raised(error: &Error) -> Option<String> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = source {
        if let Some(Raised(message)) = error.downcast_ref::<Raised>() {
            return Some(message.clone());
        }
        source = error.source();
    }
    None
}

fn strftime_now(format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, &jiff::Zoned::now()).map_err(|error| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {error}"))
    })
}

/// `tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`: no escaping of
/// HTML, unlike Jinja's own.
fn to_json(state: &mut State, value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::UndefinedError, "tojson of an undefined value"));
    }
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let (between_items, after_key) = match separators.as_deref() {
        Some([items, key]) => (items.clone(), key.clone()),
        Some(_) => {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: expected two separators"));
        }
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style {
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        indent,
        between_items,
        after_key,
        sort_keys: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let texts = [style.indent.as_deref().unwrap_or_default(), &style.between_items, &style.after_key];
    if texts.iter().any(|text| text.len() > SEPARATOR) {
        let message = format!("tojson: expected indent and separators of at most {SEPARATOR} bytes");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    guard::look_to_write(state, value)?;
    let json = serde_json::to_value(value)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    let text = python_json::write(&json, &style, OUTPUT)
        .ok_or_else(|| Error::new(ErrorKind::WriteFailure, too_long()))?;
    guard::build(state, text.len())?;
    Ok(Value::from_safe_string(text))
}

/// `{% generation %}` marks the assistant's part for training and changes nothing else; it becomes a
/// block that is always taken, with the same control of white space.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end + 2);
        let inner = tag.trim_start_matches("{%").trim_end_matches("%}");
        match inner.trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replace("generation", "if true")),
            "endgeneration" => out.push_str(&tag.replace("endgeneration", "endif")),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

fn describe(error: &Error) -> String {
    let line = error.line().map(|line| format!(" (line {line})"));
    // The name of a tag or a filter can be as long as the template.
    shown(format!("{error}{}", line.unwrap_or_default()), MESSAGE_BYTES)
}

/// Tokens of the longest tag.
fn longest_tag<'s, T>(tokens: impl Iterator<Item = (Token<'s>, T)>) -> usize {
    let lengths = tokens.scan(0, |length, (token, _)| {
        *length = match token {
            Token::TemplateData(_) | Token::VariableStart | Token::BlockStart => 0,
            _ => *length + 1,
        };
        Some(*length)
    });
    lengths.max().unwrap_or(0)
}
