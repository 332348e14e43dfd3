//! Chat templates, chosen and rendered as transformers 5.24 does (`tokenization_utils_base.py`,
//! `utils/chat_template_utils.py`).

use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value as Json};

use crate::error::{CheckpointError, MESSAGE_BYTES, truncated};
use crate::fields::Fields;
use crate::json;
use crate::store::{Folder, Store};
use crate::text::error::TextError;
use crate::text::jinja;

/// Bytes of a template.
const SOURCE: usize = 1 << 20;
/// Named templates of a model.
const TEMPLATES: usize = 64;
/// Stack of a rendering: 100 macros, each with 100 nested statements and expressions. Lists are nested at most
/// 200 levels deep. Only what is used of it takes memory.
const STACK: usize = 256 << 20;

const NAME: &str = "chat_template";
const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

const CONFIG: &str = "tokenizer_config.json";
const JINJA: &str = "chat_template.jinja";
/// Further templates by their names. A store cannot list a folder, so that the names that models use are tried.
const ADDITIONAL: [(&str, &str); 2] =
    [(TOOL_USE, "additional_chat_templates/tool_use.jinja"), ("rag", "additional_chat_templates/rag.jinja")];
const LEGACY: &str = "chat_template.json";
const SPECIAL_TOKENS_MAP: &str = "special_tokens_map.json";

/// The special tokens that a template can name.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Variables that a request sets in other ways than by `chat_template_kwargs`.
const RESERVED: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// Names of a message's reasoning, the first one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A model's chat templates: one, or several by name.
#[derive(Debug)]
pub struct ChatTemplate {
    templates: Vec<Named>,
    special_tokens: BTreeMap<&'static str, String>,
}

/// One template.
#[derive(Debug)]
struct Named {
    name: String,
    path: PathBuf,
    source: String,
    parsed: jinja::Template,
    reads: HashSet<Arc<str>>,
}

/// Everything that a conversation is rendered with beside its messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rendering<'a> {
    /// The tools that the model may call, as OpenAI's requests have them.
    pub tools: Option<&'a [Json]>,
    /// How much the model is to think, as `reasoning_effort` of OpenAI's requests; the template knows of none where absent.
    pub reasoning_effort: Option<&'a str>,
    /// Further variables, as `chat_template_kwargs` of a request; they go before special tokens and
    /// `reasoning_effort`.
    pub kwargs: Option<&'a Map<String, Json>>,
    /// Opens the assistant's answer.
    pub add_generation_prompt: bool,
}

impl ChatTemplate {
    /// Opens the templates of a folder, `None` where there are none: `chat_template.jinja` and
    /// `additional_chat_templates/`, else `chat_template` of `tokenizer_config.json` (one template, or a list of
    /// named ones), else `chat_template.json`.
    ///
    /// # Errors
    /// A file cannot be read, or a template is broken.
    pub fn open(folder: impl AsRef<Path>) -> Result<Option<Self>, TextError> {
        Self::open_in(&Folder::new(folder.as_ref()))
    }

    /// Opens as [`Self::open`], from any store. Of `additional_chat_templates/` it finds `tool_use` and `rag`.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub fn open_in(store: &dyn Store) -> Result<Option<Self>, TextError> {
        let config_path = store.root().join(CONFIG);
        let config = json::object_if_present(store, CONFIG)?.unwrap_or_default();
        let special_tokens = special_tokens(store, &config_path, &config)?;
        let mut templates = Vec::new();
        for (name, file) in [(DEFAULT, JINJA)].into_iter().chain(ADDITIONAL) {
            if let Some(bytes) = json::read_optional(store, file)? {
                let path = store.root().join(file);
                let source = String::from_utf8(bytes).map_err(|error| TextError::Template {
                    path: path.clone(),
                    message: error.to_string(),
                })?;
                templates.push(Named::new(name, &path, source)?);
            }
        }
        if templates.is_empty() {
            templates = templates_of(&config_path, &config)?;
        }
        if templates.is_empty()
            && let Some(object) = json::object_if_present(store, LEGACY)?
        {
            templates = templates_of(&store.root().join(LEGACY), &object)?;
        }
        Ok((!templates.is_empty()).then_some(Self { templates, special_tokens }))
    }

    fn named(&self, name: &str) -> Option<&Named> {
        self.templates.iter().find(|template| template.name == name)
    }

    /// The template for a conversation, none where the model has several and none of them is the default.
    fn chosen(&self, has_tools: bool) -> Option<&Named> {
        let tool_use = if has_tools { self.named(TOOL_USE) } else { None };
        tool_use.or_else(|| self.named(DEFAULT))
    }

    /// The text of the default template; without one, of the first.
    #[must_use]
    pub fn source(&self) -> &str {
        self.source_for(false)
    }

    /// The text of the template that a conversation with tools, or without, is rendered by.
    #[must_use]
    pub fn source_for(&self, has_tools: bool) -> &str {
        self.chosen(has_tools).or(self.templates.first()).map_or("", |template| &template.source)
    }

    /// Returns whether one of the templates reads the variable `name` before it sets it.
    #[must_use]
    pub fn reads(&self, name: &str) -> bool {
        self.templates.iter().any(|template| template.reads.contains(name))
    }

    /// Renders a conversation. `messages` are objects with `role` and `content` and whatever
    /// else the template knows; `add_generation_prompt` opens the assistant's answer.
    ///
    /// The text holds the special tokens, encode it without adding any.
    ///
    /// # Errors
    /// [`TextError::Refused`] where the template refuses the conversation, [`TextError::Template`]
    /// where the template fails, [`TextError::NoDefaultTemplate`] where no template is for it.
    pub fn render(&self, messages: &[Json], add_generation_prompt: bool) -> Result<String, TextError> {
        self.render_with(messages, Rendering { add_generation_prompt, ..Rendering::default() })
    }

    /// Renders as [`Self::render`], with all that a request can say.
    ///
    /// # Errors
    /// As [`Self::render`], and [`TextError::TemplateVariable`] for a reserved name in `kwargs`.
    pub fn render_with(&self, messages: &[Json], rendering: Rendering<'_>) -> Result<String, TextError> {
        let Rendering { tools, reasoning_effort, kwargs, add_generation_prompt } = rendering;
        let template = self.chosen(tools.is_some()).ok_or_else(|| {
            let names = self
                .templates
                .iter()
                .map(|template| format!("`{}`", truncated(&template.name, MESSAGE_BYTES)));
            let path = self.templates.first().map(|template| template.path.clone()).unwrap_or_default();
            TextError::NoDefaultTemplate { path, names: names.collect::<Vec<_>>().join(", ") }
        })?;
        let mut context: Vec<(&str, Json)> =
            self.special_tokens.iter().map(|(name, token)| (*name, Json::from(token.as_str()))).collect();
        if let Some(effort) = reasoning_effort {
            context.push(("reasoning_effort", effort.into()));
        }
        context.push(("documents", Json::Null));
        for (name, value) in kwargs.into_iter().flatten() {
            if RESERVED.contains(&name.as_str()) {
                return Err(TextError::TemplateVariable { name: name.clone() });
            }
            context.push((name, value.clone()));
        }
        context.push(("messages", messages.iter().map(normalized).collect()));
        context.push(("tools", tools.map_or(Json::Null, |tools| tools.into())));
        context.push(("add_generation_prompt", add_generation_prompt.into()));
        let failed = |message| TextError::Template { path: template.path.clone(), message };
        let rendered = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("template".to_owned()).stack_size(STACK);
            let thread = thread.spawn_scoped(scope, || jinja::render(&template.parsed, &context));
            thread.map(std::thread::ScopedJoinHandle::join)
        });
        match rendered {
            Ok(Ok(Ok(text))) => Ok(text),
            Ok(Ok(Err(error))) if error.raised => {
                Err(TextError::Refused(truncated(error.message, MESSAGE_BYTES)))
            }
            Ok(Ok(Err(error))) => Err(failed(describe(error))),
            Ok(Err(_panic)) => Err(failed("rendering it crashed".to_owned())),
            Err(error) => Err(failed(format!("cannot start a thread to render it: {error}"))),
        }
    }
}

impl Named {
    fn new(name: &str, path: &Path, source: String) -> Result<Self, TextError> {
        let broken = |message: String| TextError::Template { path: path.to_owned(), message };
        if source.len() > SOURCE {
            return Err(broken(format!("longer than {SOURCE} bytes")));
        }
        let parsed = jinja::parse(&source).map_err(|error| broken(describe(error)))?;
        let reads = jinja::variables(&parsed);
        Ok(Self { name: name.to_owned(), path: path.to_owned(), source, parsed, reads })
    }
}

/// A message as transformers hands it to a template: without what is null, its reasoning under the names that
/// templates read.
fn normalized(message: &Json) -> Json {
    let Json::Object(message) = message else {
        return message.clone();
    };
    let given: Map<String, Json> = message
        .iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let Some(reasoning) = REASONING.iter().find_map(|name| given.get(*name)).cloned() else {
        return given.into();
    };
    let mut normalized = Map::new();
    normalized.insert("thinking".to_owned(), reasoning.clone());
    normalized.extend(given);
    normalized.insert("reasoning_content".to_owned(), reasoning);
    normalized.into()
}

/// The templates in a config: a string, or a list of {name, template}.
fn templates_of(path: &Path, object: &Map<String, Json>) -> Result<Vec<Named>, TextError> {
    let fields = Fields::new(path, object);
    let wrong = || fields.error(NAME, "expected a string or a list of objects with `name` and `template`");
    match fields.get(NAME) {
        None => Ok(Vec::new()),
        Some(Json::String(source)) => Ok(vec![Named::new(DEFAULT, path, source.clone())?]),
        Some(Json::Array(list)) if (1..=TEMPLATES).contains(&list.len()) => {
            let mut templates = Vec::new();
            for entry in list {
                let text = |field| entry.get(field).and_then(Json::as_str);
                let (name, source) = text("name").zip(text("template")).ok_or_else(wrong)?;
                templates.push(Named::new(name, path, source.to_owned())?);
            }
            Ok(templates)
        }
        Some(Json::Array(list)) => {
            let message = format!("expected 1 to {TEMPLATES} templates, got {}", list.len());
            Err(fields.error(NAME, message).into())
        }
        Some(_) => Err(wrong().into()),
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

fn describe(error: jinja::Error) -> String {
    let line = error.line.map(|line| format!(" (line {line})"));
    // The name of a tag or a filter can be as long as the template.
    truncated(format!("{}{}", error.message, line.unwrap_or_default()), MESSAGE_BYTES)
}
