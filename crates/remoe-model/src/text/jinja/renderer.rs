//! Rendering of a parsed template: statements, scopes and calls of macros.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::access::abbreviated;
use super::ast::{Expr, ForLoop, Macro, Stmt, Target, Template};
use super::calls::CallArguments;
use super::error::{Error, fail};
use super::limits::Limits;
use super::objects::{LoopState, Object};
use super::python_text;
use super::value::{Items, Map, Value};

/// State of a rendering.
pub(super) struct Renderer<'t> {
    template: &'t Template,
    pub(super) limits: Limits,
    scopes: Vec<Scope>,
    scope: usize,
    /// Number of macros that were created. A scope stays alive if a macro was created in it.
    macros_created: usize,
    /// Outputs that are being written: the rendering's own and those of captured blocks, innermost last.
    out: Vec<String>,
    /// Running recursive loops and the scopes that enclose them.
    recursive: Vec<(&'t ForLoop, usize)>,
}

/// Variables of a scope and the index of the enclosing scope.
#[derive(Default)]
struct Scope {
    names: HashMap<Arc<str>, Value>,
    parent: Option<usize>,
}

/// Continuation after a statement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ControlFlow {
    Next,
    Break,
    Continue,
}

/// Renders `template` with the variables of `context`.
///
/// # Errors
/// The template fails, raises an exception, or exceeds the limits.
pub(super) fn render(template: &Template, context: HashMap<Arc<str>, Value>) -> Result<String, Error> {
    let mut renderer = Renderer {
        template,
        limits: Limits::default(),
        scopes: vec![Scope { names: context, parent: None }],
        scope: 0,
        macros_created: 0,
        out: vec![String::new()],
        recursive: Vec::new(),
    };
    renderer.statements(&template.body)?;
    Ok(renderer.out.pop().unwrap_or_default())
}

impl<'t> Renderer<'t> {
    /// Returns the value of a variable or function; undefined if there is none.
    pub(super) fn lookup(&self, name: &Arc<str>) -> Value {
        let mut scope = Some(self.scope);
        while let Some(found) = scope.and_then(|number| self.scopes.get(number)) {
            if let Some(value) = found.names.get(name) {
                return value.clone();
            }
            scope = found.parent;
        }
        super::calls::global_function(name)
            .unwrap_or_else(|| Value::undefined(format!("'{}' is undefined", abbreviated(name))))
    }

    fn store(&mut self, name: &Arc<str>, value: Value) {
        if let Some(scope) = self.scopes.get_mut(self.scope) {
            scope.names.insert(name.clone(), value);
        }
    }

    /// Evaluates in a new scope below `parent`.
    fn scoped<T>(
        &mut self,
        parent: usize,
        evaluate: impl FnOnce(&mut Self) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let (before, length, macros_created) = (self.scope, self.scopes.len(), self.macros_created);
        self.scopes.push(Scope { names: HashMap::new(), parent: Some(parent) });
        self.scope = length;
        let result = evaluate(self);
        self.scope = before;
        if self.macros_created == macros_created {
            self.scopes.truncate(length);
        }
        result
    }

    /// Returns the text that `evaluate` writes.
    fn capture_output(
        &mut self,
        evaluate: impl FnOnce(&mut Self) -> Result<ControlFlow, Error>,
    ) -> Result<String, Error> {
        self.out.push(String::new());
        let result = evaluate(self);
        let text = self.out.pop().unwrap_or_default();
        result.map(|_| text)
    }

    fn write(&mut self, text: &str) -> Result<(), Error> {
        self.limits.charge_output(text.len())?;
        if let Some(out) = self.out.last_mut() {
            out.push_str(text);
        }
        Ok(())
    }

    fn write_value(&mut self, value: &Value) -> Result<(), Error> {
        match value {
            Value::Text(text) => self.write(text),
            other => {
                let text = python_text::to_str(&mut self.limits, other)?;
                self.write(&text)
            }
        }
    }

    fn statements(&mut self, body: &'t [Stmt]) -> Result<ControlFlow, Error> {
        for statement in body {
            let flow = self.statement(statement)?;
            if flow != ControlFlow::Next {
                return Ok(flow);
            }
        }
        Ok(ControlFlow::Next)
    }

    fn statement(&mut self, statement: &'t Stmt) -> Result<ControlFlow, Error> {
        self.limits.charge_step()?;
        match statement {
            Stmt::Text(text) => self.write(text)?,
            Stmt::Output(expr) => {
                let value = self.evaluate(expr)?;
                self.write_value(&value).map_err(|error| error.in_line(expr.line))?;
            }
            Stmt::If(branches, otherwise) => {
                for (test, body) in branches {
                    if self.evaluate(test)?.is_truthy() {
                        return self.statements(body);
                    }
                }
                return self.statements(otherwise);
            }
            Stmt::For(statement) => {
                let items = self.evaluate(&statement.iter)?;
                let scope = self.scope;
                return self.run_loop(statement, &items, scope, 0);
            }
            Stmt::Set(target, expr) => {
                let value = self.evaluate_with_markup(expr)?;
                self.assign(target, value).map_err(|error| error.in_line(expr.line))?;
            }
            Stmt::SetBlock(target, filter, body) => {
                let scope = self.scope;
                let text = self.capture_output(|renderer| {
                    renderer.scoped(scope, |renderer| renderer.statements(body))
                })?;
                self.limits.charge_text(text.len())?;
                let mut value = Value::Text(text.into());
                if let Some(filter) = filter {
                    value = self.evaluate_filters(filter, value)?;
                }
                self.assign(target, value)?;
            }
            Stmt::Macro(number) => {
                let value = self.make_macro(*number)?;
                if let Some(definition) = self.template.macros.get(*number) {
                    self.store(&definition.name, value);
                }
            }
            Stmt::CallBlock(call, number) => {
                let caller = self.make_macro(*number)?;
                let value = self.evaluate_call(call, Some(caller))?;
                self.write_value(&value).map_err(|error| error.in_line(call.line))?;
            }
            Stmt::Filter(filter, body) => {
                let scope = self.scope;
                let text = self.capture_output(|renderer| {
                    renderer.scoped(scope, |renderer| renderer.statements(body))
                })?;
                self.limits.charge_text(text.len())?;
                let value = self.evaluate_filters(filter, Value::Text(text.into()))?;
                self.write_value(&value).map_err(|error| error.in_line(filter.line))?;
            }
            Stmt::With(values, body) => {
                let mut evaluated = Vec::new();
                for (target, expr) in values {
                    evaluated.push((target, self.evaluate(expr)?));
                }
                return self.scoped(self.scope, |renderer| {
                    for (target, value) in evaluated {
                        renderer.assign(target, value)?;
                    }
                    renderer.statements(body)
                });
            }
            Stmt::Block(body) => return self.scoped(0, |renderer| renderer.statements(body)),
            Stmt::Generation(body) => return self.scoped(self.scope, |renderer| renderer.statements(body)),
            Stmt::Break => return Ok(ControlFlow::Break),
            Stmt::Continue => return Ok(ControlFlow::Continue),
            Stmt::Unavailable(tag, line) => {
                return Err(Error::at(
                    format!("'{tag}' needs other templates, of which there are none"),
                    *line,
                ));
            }
        }
        Ok(ControlFlow::Next)
    }

    fn assign(&mut self, target: &Target, value: Value) -> Result<(), Error> {
        match target {
            Target::Name(name) => self.store(name, value),
            Target::Tuple(targets) => {
                let items = self.iterate(&value).map_err(|_| {
                    Error::new(format!("cannot unpack non-iterable {} object", value.type_name()))
                })?;
                if items.len() != targets.len() {
                    return fail(format!("expected {} values to unpack, got {}", targets.len(), items.len()));
                }
                for (target, item) in targets.iter().zip(&*items) {
                    self.assign(target, item.clone())?;
                }
            }
            Target::Attribute(name, attribute) => {
                self.limits.check_stored(&value, 1)?;
                match self.lookup(name) {
                    Value::Object(object) => match &*object {
                        Object::Namespace(values) => {
                            set_attribute(&mut values.borrow_mut(), attribute, value)?
                        }
                        _ => return fail("cannot assign attribute on non-namespace object"),
                    },
                    _ => return fail("cannot assign attribute on non-namespace object"),
                }
            }
        }
        Ok(())
    }

    /// Runs a loop over the items of a value. Each pass has a scope below `parent`; `depth` is the level of a
    /// recursive loop.
    fn run_loop(
        &mut self,
        statement: &'t ForLoop,
        value: &Value,
        parent: usize,
        depth: usize,
    ) -> Result<ControlFlow, Error> {
        let mut items = self.iterate(value).map_err(|error| error.in_line(statement.iter.line))?;
        // Jinja2 tests an item just before its pass, unless the body reads `loop`, whose length counts only items
        // that pass the test.
        let mut deferred_test = None;
        match &statement.test {
            Some(test) if statement.reads_loop => {
                let mut kept = Vec::new();
                for item in &*items {
                    if self.passes_test(statement, test, item, parent)? {
                        kept.push(item.clone());
                    }
                }
                items = Rc::new(Items::new(kept));
            }
            test => deferred_test = test.as_ref(),
        }
        let recursive = statement.recursive.then(|| {
            self.recursive.push((statement, parent));
            self.recursive.len() - 1
        });
        let state = Object::Loop(LoopState {
            items: items.clone(),
            index: Cell::new(0),
            depth,
            recursive,
            changed: RefCell::new(None),
        });
        let state = Rc::new(state);
        let name: Arc<str> = "loop".into();
        let mut completed = false;
        for (index, item) in items.iter().enumerate() {
            if let Some(test) = deferred_test
                && !self.passes_test(statement, test, item, parent)?
            {
                continue;
            }
            self.limits.charge_step()?;
            if let Object::Loop(state) = &*state {
                state.index.set(index);
            }
            let flow = self.scoped(parent, |renderer| {
                renderer.store(&name, Value::Object(state.clone()));
                renderer
                    .assign(&statement.target, item.clone())
                    .map_err(|error| error.in_line(statement.iter.line))?;
                renderer.statements(&statement.body)
            })?;
            match flow {
                ControlFlow::Next => completed = true,
                ControlFlow::Continue => (),
                ControlFlow::Break => break,
            }
        }
        if let Some(number) = recursive {
            self.recursive.truncate(number);
        }
        if !completed {
            // Jinja2 runs `else` unless a pass reached the end of the body, so also after `break` and `continue`. Like
            // the body, it has a scope of its own.
            return self.scoped(parent, |renderer| renderer.statements(&statement.otherwise));
        }
        Ok(ControlFlow::Next)
    }

    /// Reports if an item passes the `if` of a loop.
    fn passes_test(
        &mut self,
        statement: &'t ForLoop,
        test: &'t Expr,
        item: &Value,
        parent: usize,
    ) -> Result<bool, Error> {
        self.limits.charge_step()?;
        let passes = self.scoped(parent, |renderer| {
            renderer.assign(&statement.target, item.clone())?;
            renderer.evaluate(test)
        })?;
        Ok(passes.is_truthy())
    }

    /// Evaluates `loop(items)` of a recursive loop.
    pub(super) fn call_loop(&mut self, state: &LoopState, items: &Value) -> Result<Value, Error> {
        let Some((statement, parent)) =
            state.recursive.and_then(|number| self.recursive.get(number).copied())
        else {
            return fail("The loop must have the 'recursive' marker to be called recursively.");
        };
        self.limits.enter_call()?;
        let before = std::mem::replace(&mut self.scope, parent);
        let text =
            self.capture_output(|renderer| renderer.run_loop(statement, items, parent, state.depth + 1));
        self.scope = before;
        self.limits.leave_call();
        let text = text?;
        self.limits.charge_text(text.len())?;
        Ok(Value::Text(text.into()))
    }

    fn make_macro(&mut self, number: usize) -> Result<Value, Error> {
        let Some(definition) = self.template.macros.get(number) else {
            return fail("unknown macro");
        };
        self.macros_created += 1;
        Ok(Value::object(Object::Macro(number, self.scope, definition.name.clone())))
    }

    /// Calls the macro `number` in the scope of its definition and returns its output.
    pub(super) fn call_macro(
        &mut self,
        number: usize,
        scope: usize,
        args: CallArguments,
    ) -> Result<Value, Error> {
        let Some(definition) = self.template.macros.get(number) else {
            return fail("unknown macro");
        };
        self.limits.enter_call()?;
        let before = std::mem::replace(&mut self.scope, scope);
        let text = self.capture_output(|renderer| {
            renderer.scoped(scope, |renderer| {
                renderer.bind_parameters(definition, args)?;
                renderer.statements(&definition.body)
            })
        });
        self.scope = before;
        self.limits.leave_call();
        let text = text?;
        self.limits.charge_text(text.len())?;
        Ok(Value::Text(text.into()))
    }

    /// Sets the parameters of a macro to the arguments of a call, in the current scope.
    fn bind_parameters(&mut self, definition: &'t Macro, args: CallArguments) -> Result<(), Error> {
        let CallArguments { positional, mut named } = args;
        let name = &definition.name;
        self.limits.charge_list(positional.len() + named.len() + definition.parameters.len())?;
        let mut take = |wanted: &str| {
            let index = named.iter().position(|(name, _)| **name == *wanted)?;
            Some(named.remove(index).1)
        };
        let extra = positional.get(definition.parameters.len()..).unwrap_or_default().to_vec();
        let mut missing: Vec<(&Arc<str>, Option<&Expr>)> = Vec::new();
        let mut values = positional.into_iter();
        let mut bound = Vec::new();
        for (parameter, default) in &definition.parameters {
            match values.next().or_else(|| take(parameter)) {
                Some(value) => bound.push((parameter, value)),
                None => missing.push((parameter, default.as_ref())),
            }
        }
        if definition.caller {
            let caller = take("caller").filter(|caller| !matches!(caller, Value::None));
            self.store(&"caller".into(), caller.unwrap_or_else(|| Value::undefined("No caller defined")));
        }
        if definition.kwargs {
            let mut map = Map::default();
            for (name, value) in named {
                map.insert_text(&name, value);
            }
            self.store(&"kwargs".into(), Value::map(map));
        } else if let Some((unknown, _)) = named.first() {
            return fail(format!("macro '{name}' takes no keyword argument '{unknown}'"));
        }
        if definition.varargs {
            self.store(&"varargs".into(), Value::tuple(extra));
        } else if !extra.is_empty() {
            let most = definition.parameters.len();
            return fail(format!("macro '{name}' takes not more than {most} argument(s)"));
        }
        for (parameter, value) in bound {
            self.store(parameter, value);
        }
        // A default may read the parameters before it, which are set by now.
        for (parameter, default) in missing {
            let value = match default {
                Some(default) => self.evaluate(default)?,
                None => Value::undefined(format!("parameter '{}' was not provided", abbreviated(parameter))),
            };
            self.store(parameter, value);
        }
        Ok(())
    }
}

/// Sets an attribute of a namespace.
pub(super) fn set_attribute(values: &mut Map, name: &str, value: Value) -> Result<(), Error> {
    if name.starts_with('_') {
        return fail(format!("a namespace cannot have the attribute '{name}': it begins with an underscore"));
    }
    values.insert_text(name, value);
    Ok(())
}
