//! Refuses fields by name that would change the answer and are unsupported.

use super::fields::Given;
use super::request_body::RequestBody;
use remoe_proto::ServiceError;

/// Refuses fields that no route supports.
///
/// # Errors
/// Fails with the first such field.
pub(super) fn refuse(body: &RequestBody) -> Result<(), ServiceError> {
    let fields = [
        ("functions", &body.functions),
        ("audio", &body.audio),
        ("web_search_options", &body.web_search_options),
        ("use_beam_search", &body.use_beam_search),
        ("include_stop_str_in_output", &body.include_stop_str_in_output),
        ("truncate_prompt_tokens", &body.truncate_prompt_tokens),
        ("allowed_token_ids", &body.allowed_token_ids),
        ("bad_words", &body.bad_words),
        ("prompt_embeds", &body.prompt_embeds),
        ("chat_template", &body.chat_template),
        ("continue_final_message", &body.continue_final_message),
        ("documents", &body.documents),
    ];
    for (name, given) in fields {
        if *given != Given::Nothing {
            return Err(unsupported(name));
        }
    }
    // Completions have taken their own fields before.
    if body.suffix != Given::Nothing {
        let message = "`suffix` is supported by /v1/completions only";
        return Err(ServiceError::invalid("suffix", message));
    }
    match &body.function_call {
        Given::Nothing => (),
        Given::Text(choice) if choice == "none" => (),
        _ => return Err(unsupported("function_call")),
    }
    // Chats have taken their own fields before.
    let is_none = matches!(&body.reasoning_effort, Given::Text(effort) if effort == "none");
    for (name, is_given) in [
        ("reasoning_effort", body.reasoning_effort != Given::Nothing && !is_none),
        ("reasoning", body.reasoning.is_some()),
        ("enable_thinking", body.enable_thinking == Some(true)),
        ("thinking_token_budget", body.thinking_token_budget.is_some()),
        ("chat_template_kwargs", body.chat_template_kwargs.is_some()),
    ] {
        if is_given {
            let message = format!("`{name}` is supported by /v1/chat/completions only");
            return Err(ServiceError::invalid(name, message));
        }
    }
    if body.modalities.iter().flatten().any(|modality| modality != "text") {
        return Err(unsupported("modalities"));
    }
    if body.prompt_logprobs.is_some() {
        return Err(ServiceError::invalid(
            "prompt_logprobs",
            "`prompt_logprobs` is not supported; use `echo` and `logprobs` of /v1/completions",
        ));
    }
    if let Some(options) = &body.stream_options {
        if body.stream != Some(true) {
            return Err(ServiceError::invalid("stream_options", "`stream_options` requires `stream: true`"));
        }
        if options.0.continuous_usage_stats != Given::Nothing {
            return Err(unsupported("stream_options.continuous_usage_stats"));
        }
    }
    let choices = body.n.unwrap_or(1);
    if body.best_of.is_some_and(|best_of| best_of != choices) {
        return Err(ServiceError::invalid(
            "best_of",
            format!("unsupported `best_of`: expected the value of `n` ({choices})"),
        ));
    }
    Ok(())
}

pub(super) fn unsupported(name: &str) -> ServiceError {
    ServiceError::invalid(name, format!("`{name}` is not supported"))
}
