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

/// Largest size of a template in bytes.
const MAX_TEMPLATE_BYTES: usize = 1 << 20;
/// Most named templates of a model.
const MAX_TEMPLATES: usize = 64;
/// Stack of the thread that renders, in bytes. It holds 100 nested macro calls, each with 100 nested statements and
/// expressions, and lists that are nested 200 levels deep. Only pages that are touched take memory.
const RENDER_STACK_BYTES: usize = 256 << 20;

const TEMPLATE_FIELD: &str = "chat_template";
const DEFAULT_NAME: &str = "default";
const TOOL_USE_NAME: &str = "tool_use";

const CONFIG_FILE: &str = "tokenizer_config.json";
const JINJA_FILE: &str = "chat_template.jinja";
/// Further templates, by name and file. A store cannot list a folder, so the names that published models use are
/// tried.
const ADDITIONAL_TEMPLATES: [(&str, &str); 2] = [
    (TOOL_USE_NAME, "additional_chat_templates/tool_use.jinja"),
    ("rag", "additional_chat_templates/rag.jinja"),
];
const LEGACY_FILE: &str = "chat_template.json";
const SPECIAL_TOKENS_MAP_FILE: &str = "special_tokens_map.json";

/// Special tokens that a template can read as variables.
const SPECIAL_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// Variables that fields of a request set, so that `chat_template_kwargs` must not.
const RESERVED_VARIABLES: [&str; 3] = ["messages", "tools", "add_generation_prompt"];

/// Fields that hold a message's reasoning, in order of preference.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// Chat templates of a model: a single one, or several by name.
#[derive(Debug)]
pub struct ChatTemplate {
    templates: Vec<NamedTemplate>,
    special_tokens: BTreeMap<&'static str, String>,
}

/// A template, its name and the variables that it reads.
#[derive(Debug)]
struct NamedTemplate {
    name: String,
    path: PathBuf,
    source: String,
    parsed: jinja::Template,
    free_variables: HashSet<Arc<str>>,
}

/// Inputs of a rendering beside the messages.
#[derive(Debug, Clone, Copy, Default)]
pub struct Rendering<'a> {
    /// Tools that the model may call, in the form of OpenAI's requests.
    pub tools: Option<&'a [Json]>,
    /// Effort of the model's reasoning, as `reasoning_effort` of OpenAI's requests. If absent, the variable is undefined in
    /// the template.
    pub reasoning_effort: Option<&'a str>,
    /// Further variables, as `chat_template_kwargs` of a request. They override special tokens and
    /// `reasoning_effort`.
    pub kwargs: Option<&'a Map<String, Json>>,
    /// Ends the text with the start of the assistant's answer.
    pub add_generation_prompt: bool,
}

impl ChatTemplate {
    /// Opens the templates of a folder, or returns `None` if it has none.
    ///
    /// Read are `chat_template.jinja` and `additional_chat_templates/`; without these, `chat_template` of
    /// `tokenizer_config.json` (a template, or a list of named ones); without it, `chat_template.json`.
    ///
    /// # Errors
    /// [`TextError::Checkpoint`] if a file cannot be read or a field has the wrong type, [`TextError::Template`] if a
    /// template is invalid.
    pub fn open(folder: impl AsRef<Path>) -> Result<Option<Self>, TextError> {
        Self::open_in(&Folder::new(folder.as_ref()))
    }

    /// Opens the templates of a store as [`Self::open`] does; of `additional_chat_templates/` only `tool_use` and `rag`
    /// are found.
    ///
    /// # Errors
    /// Fails as [`Self::open`] does.
    pub fn open_in(store: &dyn Store) -> Result<Option<Self>, TextError> {
        let config_path = store.root().join(CONFIG_FILE);
        let config = json::object_if_present(store, CONFIG_FILE)?.unwrap_or_default();
        let special_tokens = special_tokens(store, &config_path, &config)?;
        let mut templates = Vec::new();
        for (name, file) in [(DEFAULT_NAME, JINJA_FILE)].into_iter().chain(ADDITIONAL_TEMPLATES) {
            if let Some(bytes) = json::read_optional(store, file)? {
                let path = store.root().join(file);
                let source = String::from_utf8(bytes).map_err(|error| TextError::Template {
                    path: path.clone(),
                    message: error.to_string(),
                })?;
                templates.push(NamedTemplate::new(name, &path, source)?);
            }
        }
        if templates.is_empty() {
            templates = templates_in_config(&config_path, &config)?;
        }
        if templates.is_empty()
            && let Some(object) = json::object_if_present(store, LEGACY_FILE)?
        {
            templates = templates_in_config(&store.root().join(LEGACY_FILE), &object)?;
        }
        Ok((!templates.is_empty()).then_some(Self { templates, special_tokens }))
    }

    fn find(&self, name: &str) -> Option<&NamedTemplate> {
        self.templates.iter().find(|template| template.name == name)
    }

    /// Returns the template for a conversation, or `None` if the model has several and none is named `default`.
    fn template_for(&self, has_tools: bool) -> Option<&NamedTemplate> {
        let tool_use = if has_tools { self.find(TOOL_USE_NAME) } else { None };
        tool_use.or_else(|| self.find(DEFAULT_NAME))
    }

    /// Returns the source of the default template, or of the first template if none is the default.
    #[must_use]
    pub fn source(&self) -> &str {
        self.source_for(false)
    }

    /// Returns the source of the template that renders a conversation with or without tools.
    #[must_use]
    pub fn source_for(&self, has_tools: bool) -> &str {
        self.template_for(has_tools).or(self.templates.first()).map_or("", |template| &template.source)
    }

    /// Reports if any template reads the variable `name` without having set it.
    #[must_use]
    pub fn reads(&self, name: &str) -> bool {
        self.templates.iter().any(|template| template.free_variables.contains(name))
    }

    /// Renders a conversation to the text of a prompt.
    ///
    /// `messages` are objects with `role`, `content` and any other field that the template reads.
    /// `add_generation_prompt` ends the text with the start of the assistant's answer. The text contains
    /// the special tokens, so it must be encoded without adding any.
    ///
    /// # Errors
    /// [`TextError::Refused`] if the template rejects the conversation, [`TextError::Template`] if the
    /// template fails, [`TextError::NoDefaultTemplate`] if no template applies.
    pub fn render(&self, messages: &[Json], add_generation_prompt: bool) -> Result<String, TextError> {
        self.render_with(messages, Rendering { add_generation_prompt, ..Rendering::default() })
    }

    /// Renders a conversation as [`Self::render`] does, with tools and further variables.
    ///
    /// # Errors
    /// Fails as [`Self::render`] does, and with [`TextError::TemplateVariable`] for a reserved name in `kwargs`.
    pub fn render_with(&self, messages: &[Json], rendering: Rendering<'_>) -> Result<String, TextError> {
        let Rendering { tools, reasoning_effort, kwargs, add_generation_prompt } = rendering;
        let template = self.template_for(tools.is_some()).ok_or_else(|| {
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
            if RESERVED_VARIABLES.contains(&name.as_str()) {
                return Err(TextError::TemplateVariable { name: name.clone() });
            }
            context.push((name, value.clone()));
        }
        context.push(("messages", messages.iter().map(normalised_message).collect()));
        context.push(("tools", tools.map_or(Json::Null, |tools| tools.into())));
        context.push(("add_generation_prompt", add_generation_prompt.into()));
        let failed = |message| TextError::Template { path: template.path.clone(), message };
        let rendered = std::thread::scope(|scope| {
            let thread =
                std::thread::Builder::new().name("template".to_owned()).stack_size(RENDER_STACK_BYTES);
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

impl NamedTemplate {
    fn new(name: &str, path: &Path, source: String) -> Result<Self, TextError> {
        let broken = |message: String| TextError::Template { path: path.to_owned(), message };
        if source.len() > MAX_TEMPLATE_BYTES {
            return Err(broken(format!("longer than {MAX_TEMPLATE_BYTES} bytes")));
        }
        let parsed = jinja::parse(&source).map_err(|error| broken(describe(error)))?;
        let free_variables = jinja::free_variables(&parsed);
        Ok(Self { name: name.to_owned(), path: path.to_owned(), source, parsed, free_variables })
    }
}

/// Returns a message as transformers passes it to a template: without null fields, with its reasoning under each
/// name that templates read.
fn normalised_message(message: &Json) -> Json {
    let Json::Object(message) = message else {
        return message.clone();
    };
    let given: Map<String, Json> = message
        .iter()
        .filter(|(_, value)| !value.is_null())
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let Some(reasoning) = REASONING_FIELDS.iter().find_map(|name| given.get(*name)).cloned() else {
        return given.into();
    };
    let mut normalized = Map::new();
    normalized.insert("thinking".to_owned(), reasoning.clone());
    normalized.extend(given);
    normalized.insert("reasoning_content".to_owned(), reasoning);
    normalized.into()
}

/// Reads the templates of a config: a string, or a list of objects with `name` and `template`.
fn templates_in_config(path: &Path, object: &Map<String, Json>) -> Result<Vec<NamedTemplate>, TextError> {
    let fields = Fields::new(path, object);
    let wrong =
        || fields.error(TEMPLATE_FIELD, "expected a string or a list of objects with `name` and `template`");
    match fields.get(TEMPLATE_FIELD) {
        None => Ok(Vec::new()),
        Some(Json::String(source)) => Ok(vec![NamedTemplate::new(DEFAULT_NAME, path, source.clone())?]),
        Some(Json::Array(list)) if (1..=MAX_TEMPLATES).contains(&list.len()) => {
            let mut templates = Vec::new();
            for entry in list {
                let text = |field| entry.get(field).and_then(Json::as_str);
                let (name, source) = text("name").zip(text("template")).ok_or_else(wrong)?;
                templates.push(NamedTemplate::new(name, path, source.to_owned())?);
            }
            Ok(templates)
        }
        Some(Json::Array(list)) => {
            let message = format!("expected 1 to {MAX_TEMPLATES} templates, got {}", list.len());
            Err(fields.error(TEMPLATE_FIELD, message).into())
        }
        Some(_) => Err(wrong().into()),
    }
}

/// Reads the special tokens of `tokenizer_config.json`, and of `special_tokens_map.json` those that it lacks. Each
/// is a string or an object with `content`.
fn special_tokens(
    store: &dyn Store,
    config_path: &Path,
    config: &Map<String, Json>,
) -> Result<BTreeMap<&'static str, String>, CheckpointError> {
    let map_path = store.root().join(SPECIAL_TOKENS_MAP_FILE);
    let map = json::object_if_present(store, SPECIAL_TOKENS_MAP_FILE)?.unwrap_or_default();
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

/// Formats an error of a template with its line, bounded in length.
fn describe(error: jinja::Error) -> String {
    let line = error.line.map(|line| format!(" (line {line})"));
    // The message may quote the name of a tag or a filter, which can be as long as the template.
    truncated(format!("{}{}", error.message, line.unwrap_or_default()), MESSAGE_BYTES)
}
