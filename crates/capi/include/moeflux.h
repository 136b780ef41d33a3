// moeflux.h: the C library of moeflux, which runs Mixture-of-Experts language models larger than
// memory. Written by cbindgen from crates/capi/src.
//
// Rules
//  1 Handles are opaque. Free a handle with the _free function of its type, once; NULL is allowed.
//    A model lives until the last handle that was made from it is freed, in any order.
//  2 Functions that can fail return a moeflux_status, 0 for success. Results go to out parameters,
//    which are written on success only; counts are 0 on failure. moeflux_error_message() has the
//    text. Codes are stable; texts are not.
//  3 Strings that go in are UTF-8. Their length is in bytes, or MOEFLUX_NUL for a string that ends
//    with a NUL, as strings without a length do. Strings that come out are UTF-8 and end with a NUL.
//    JSON that comes out is freed with moeflux_string_free.
//  4 Structs begin with their size, so that a program that was compiled with an older header goes on
//    working: new fields get their defaults. Fill options with the _init function, then change
//    fields.
//  5 Any number of threads may use a moeflux_model at once. A moeflux_session belongs to one thread
//    at a time: it may move, and of two calls at once one returns MOEFLUX_BUSY. Any thread may use a
//    moeflux_cancel, and a signal handler: it sets an atomic flag.
//  6 Callbacks run on the thread of the call, except the callbacks of moeflux_submit. They must
//    return: no longjmp, no exception. They may call functions of other handles, and close the
//    model. Calls with the session that calls them return MOEFLUX_BUSY; do not free it there.
//  7 A panic inside becomes MOEFLUX_INTERNAL. After fork() without exec, calls with handles of the
//    parent return MOEFLUX_FORKED in the child; the _free functions free nothing there.
//  8 The library prints nothing, installs no signal handler, and writes no file that was not named.
//    Drivers of graphics cards may print.
#ifndef MOEFLUX_H
#define MOEFLUX_H


#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// Length of a string that ends with a NUL.
#define MOEFLUX_NUL ((size_t)-1)

// Version of the interface. It grows by functions and fields; MAJOR changes when something is
// removed.
#define MOEFLUX_API_MAJOR 0

// Version of the interface: see MOEFLUX_API_MAJOR.
#define MOEFLUX_API_MINOR 1

// Result of a call. A code keeps its number; new ones may come.
enum moeflux_status
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  MOEFLUX_OK = 0,
  // An argument: NULL, no UTF-8, out of range, an option without a meaning.
  MOEFLUX_INVALID = 1,
  // A file cannot be opened, read or written.
  MOEFLUX_FILE = 2,
  // Contents of a checkpoint, a tensor, a tokenizer or a chat template.
  MOEFLUX_CHECKPOINT = 3,
  // An architecture, a format or a device that this build lacks.
  MOEFLUX_UNSUPPORTED = 4,
  // The budget is below the floor; the message states it.
  MOEFLUX_MEMORY = 5,
  // More tokens than the context, tokens outside the vocabulary, more sessions than planned.
  MOEFLUX_CONTEXT = 6,
  // A saved session that is damaged or of another model.
  MOEFLUX_SNAPSHOT = 7,
  // A schema, regular expression or grammar that cannot be followed.
  MOEFLUX_GRAMMAR = 8,
  // An expert could not be read, after retries.
  MOEFLUX_READ = 9,
  // A device failed or is lost.
  MOEFLUX_DEVICE = 10,
  // The session is at its last good token: moeflux_session_sync goes on.
  MOEFLUX_CANCELLED = 11,
  // The session is in use, or too many requests wait.
  MOEFLUX_BUSY = 12,
  // The model was closed.
  MOEFLUX_CLOSED = 13,
  // The process was forked after the handle was made.
  MOEFLUX_FORKED = 14,
  // A fault of moeflux.
  MOEFLUX_INTERNAL = 15,
  // Sampling parameters or stop strings.
  MOEFLUX_SAMPLING = 16,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum moeflux_status moeflux_status;
#else
typedef int32_t moeflux_status;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Kinds of parts. More may come: ignore the ones that you do not know.
enum moeflux_part
#if defined(__cplusplus) || __STDC_VERSION__ >= 202311L
  : int32_t
#endif // defined(__cplusplus) || __STDC_VERSION__ >= 202311L
 {
  MOEFLUX_TEXT = 0,
  MOEFLUX_REASONING = 1,
  MOEFLUX_TOOL_CALL = 2,
  MOEFLUX_PROGRESS = 3,
};
#ifndef __cplusplus
#if __STDC_VERSION__ >= 202311L
typedef enum moeflux_part moeflux_part;
#else
typedef int32_t moeflux_part;
#endif // __STDC_VERSION__ >= 202311L
#endif // __cplusplus

// Ends calls from another thread, or from a signal handler.
typedef struct moeflux_cancel moeflux_cancel;

// A point of a session, to return to.
typedef struct moeflux_mark moeflux_mark;

// A model with its scheduler. Any number of threads may use it.
typedef struct moeflux_model moeflux_model;

// A request that runs beside others.
typedef struct moeflux_request moeflux_request;

// A sequence of tokens and the state after them, for one thread at a time: a second call at once
// is MOEFLUX_BUSY.
typedef struct moeflux_session moeflux_session;

// Called with work that is done, and all work, in one unit. False ends the opening:
// MOEFLUX_CANCELLED.
typedef bool (*moeflux_on_open)(void *user, uint64_t done, uint64_t total);

// Options of opening a model. Fill them with moeflux_open_options_init, then change fields.
typedef struct {
  // Size of the struct.
  size_t size;
  // Bytes of host memory that moeflux may hold, the program's own left out; 0: the default.
  uint64_t memory;
  // Bytes of a graphics card; 0: the default.
  uint64_t device_memory;
  // "auto", "cpu", "gpu", "gpu:1", "gpu:0,gpu:1"; NULL: "auto".
  const char *device;
  // Positions per session; 0: the default.
  uint32_t context;
  // Sequences that compute together; 0: the default.
  uint32_t sessions;
  // Worker threads; 0: the default.
  uint32_t threads;
  // Whether all is computed in f32.
  bool exact;
  // Whether the forms of answers have memory.
  bool grammars;
  // NULL: none.
  moeflux_on_open progress;
  // Passed to `progress`.
  void *user;
} moeflux_open_options;

// Tokens of a call by their origin. Set `size` to the size of the struct before the call.
typedef struct {
  size_t size;
  // Tokens that did not have to be computed.
  uint64_t reused;
  // Of these, tokens of the prefix cache.
  uint64_t restored;
  // Tokens that were dropped.
  uint64_t rewound;
  // Tokens that were computed.
  uint64_t computed;
} moeflux_synced;

// Part of an answer. Pointers are borrowed until the callback returns.
typedef struct {
  // Size of the struct, which grows at its end.
  size_t size;
  // A moeflux_part.
  int32_t part;
  // Whole characters of UTF-8, with a NUL at the end; of a tool call: JSON {"index", "id",
  // "name", "arguments"}.
  const char *text;
  // Bytes of the text, without the NUL.
  size_t len;
  // Tokens of the part, and of parts before it that had no text; of moeflux_submit only.
  const uint32_t *tokens;
  size_t token_count;
  // Part of the prompt that is computed, 0 to 1.
  double progress;
} moeflux_delta;

// Called with each part of an answer. False ends the answer: MOEFLUX_OK, "finish" is "stopped".
typedef bool (*moeflux_on_delta)(void *user, const moeflux_delta *delta);

// Called once, after the last part: with MOEFLUX_OK and the answer's JSON, or with another status
// and its message.
typedef void (*moeflux_on_end)(void *user, moeflux_status status, const char *answer_json_or_message);

// Called with a message and its level, on any thread. It must not call the library.
typedef void (*moeflux_on_message)(void *user, int32_t level, const char *message);

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Version of the interface of the library that is linked: (MAJOR << 16) | MINOR.
uint32_t moeflux_api_version(void);

// Version of the program: "0.1.0".
const char *moeflux_version(void);

// Message of the last call of this thread, until its next call returns. Never NULL; empty if the
// call succeeded.
const char *moeflux_error_message(void);

// Stable name of a code: "MEMORY"; "UNKNOWN" for a code of a newer library.
const char *moeflux_status_name(int32_t status);

moeflux_cancel *moeflux_cancel_new(void);

// Ends the calls that have it, at their next layer. Any thread may call it, and a signal handler.
void moeflux_cancel_set(const moeflux_cancel *cancel);

// Lets it be used again.
void moeflux_cancel_reset(const moeflux_cancel *cancel);

void moeflux_cancel_free(moeflux_cancel *cancel);

// Writes the defaults to a struct of `size` bytes: moeflux_open_options_init calls it.
void moeflux_open_options_init_sized(moeflux_open_options *options, size_t size);

// Opens a model. `path` is a folder, a GGUF file, or "tales-18m", which is built in. Nothing is
// downloaded. `options` may be NULL.
moeflux_status moeflux_model_open(const char *path,
                                  const moeflux_open_options *options,
                                  moeflux_model **out);

// Plans the memory of a model without loading it: JSON with "lines", "total", "slots", "experts",
// "context", "sessions". Free it with moeflux_string_free.
moeflux_status moeflux_inspect(const char *path,
                               const moeflux_open_options *options,
                               char **out_json);

// Ends running calls, and frees the memory of host and card before it returns, whoever holds
// handles: their calls return MOEFLUX_CLOSED.
void moeflux_model_close(const moeflux_model *model);

void moeflux_model_free(moeflux_model *model);

// Tokens of the vocabulary; 0 if the call failed.
uint32_t moeflux_model_vocab(const moeflux_model *model);

// Values of a hidden state; 0 if the call failed.
uint32_t moeflux_model_hidden(const moeflux_model *model);

// Positions per session; 0 if the call failed.
uint32_t moeflux_model_context(const moeflux_model *model);

// Describes a model: JSON with "model" (path, architecture, device, sizes), "digest", "plan" (as
// of moeflux_inspect) and "stats" (counters of all steps). Free it with moeflux_string_free.
moeflux_status moeflux_model_describe(const moeflux_model *model, char **out_json);

// Frees a string that the library returned; NULL is nothing.
void moeflux_string_free(char *string);

// Pools the hidden states of tokens. `pooling` is "mean", "last" or "first"; `room` is at least
// moeflux_model_hidden floats.
moeflux_status moeflux_embed(const moeflux_model *model,
                             const uint32_t *tokens,
                             size_t count,
                             const char *pooling,
                             bool normalize,
                             float *out,
                             size_t room);

// Tokens of a text. As snprintf does, writes at most `room` tokens, and to `count` the number that
// there are. `add_start` adds the tokens that the model's texts begin with.
moeflux_status moeflux_encode(const moeflux_model *model,
                              const char *text,
                              size_t len,
                              bool add_start,
                              uint32_t *tokens,
                              size_t room,
                              size_t *count);

// Text of tokens. As snprintf does, writes whole characters and a NUL to at most `room` bytes, and
// to `len` the bytes that there are without the NUL.
moeflux_status moeflux_decode(const moeflux_model *model,
                              const uint32_t *tokens,
                              size_t count,
                              bool skip_special,
                              char *text,
                              size_t room,
                              size_t *len);

// Tokens of a conversation: messages as OpenAI's JSON array; options, which may be NULL, as in
// moeflux_session_generate. Writes tokens as moeflux_encode does.
moeflux_status moeflux_chat_tokens(const moeflux_model *model,
                                   const char *messages_json,
                                   size_t len,
                                   const char *options_json,
                                   size_t options_len,
                                   uint32_t *tokens,
                                   size_t room,
                                   size_t *count);

// A new session. MOEFLUX_CONTEXT: all sessions of the plan are taken.
moeflux_status moeflux_session_new(const moeflux_model *model, moeflux_session **out);

void moeflux_session_free(moeflux_session *session);

// Makes the session hold exactly these tokens; computes what is missing. `cancel` and `synced` may
// be NULL.
moeflux_status moeflux_session_sync(moeflux_session *session,
                                    const uint32_t *tokens,
                                    size_t count,
                                    const moeflux_cancel *cancel,
                                    moeflux_synced *synced);

// Appends tokens. After an error or MOEFLUX_CANCELLED, tokens of complete steps stay:
// moeflux_session_tokens has them.
moeflux_status moeflux_session_feed(moeflux_session *session,
                                    const uint32_t *tokens,
                                    size_t count,
                                    const moeflux_cancel *cancel);

// Truncates the session to its first `count` tokens. Models with recurrent states compute again
// from an earlier point.
moeflux_status moeflux_session_truncate(moeflux_session *session,
                                        size_t count,
                                        const moeflux_cancel *cancel,
                                        moeflux_synced *synced);

// A second session with the same state.
moeflux_status moeflux_session_fork(const moeflux_session *session, moeflux_session **out);

// A point to return to.
moeflux_status moeflux_session_mark(const moeflux_session *session, moeflux_mark **out);

// Returns to a mark. Computes nothing.
moeflux_status moeflux_session_rewind(moeflux_session *session, const moeflux_mark *mark);

void moeflux_mark_free(moeflux_mark *mark);

// Tokens of the session, borrowed until the next call with it. NULL if the call failed.
const uint32_t *moeflux_session_tokens(const moeflux_session *session, size_t *count);

// Logits after the last token, borrowed until the next call with the session. The count is 0 if
// there are none yet; NULL if the call failed.
const float *moeflux_session_logits(const moeflux_session *session, size_t *count);

// Saves the session to a file.
moeflux_status moeflux_session_save(const moeflux_session *session, const char *file);

// Restores a saved session. After an error the session is as it was.
moeflux_status moeflux_session_restore(moeflux_session *session, const char *file);

// Brings the session to `prompt`, or leaves it if `prompt` is NULL, and generates an answer,
// which the session then holds; of one that is stopped or cancelled it may hold a few tokens
// more than the last part, or lack the last token. `request_json`, which may be NULL, has
// sampling, max_tokens, stop, seed, logit_bias, logprobs, response_format, tools and tool_choice
// as in OpenAI's API, also top_k, min_p, repetition_penalty, stop_token_ids, enable_thinking,
// thinking_budget, chat_template_kwargs, and raw: true for text that is no conversation.
// `out_json`, which may be NULL, gets text, reasoning, tool_calls, tokens, finish ("stop",
// "length", "tool_calls", "stopped"), usage, timings, and logprobs: free it with
// moeflux_string_free. `on_delta`, which may be NULL, is called on this thread.
moeflux_status moeflux_session_generate(moeflux_session *session,
                                        const uint32_t *prompt,
                                        size_t count,
                                        const char *request_json,
                                        size_t request_len,
                                        const moeflux_cancel *cancel,
                                        moeflux_on_delta on_delta,
                                        void *user,
                                        char **out_json);

// Submits a request, which joins the running steps, and returns. `on_delta` and `on_end` are
// called on one thread of the library, which is the request's and computes nothing: a slow
// callback pauses its own request only. `on_end` is called exactly once, last. `request_json` is
// as in moeflux_session_generate; `out` gets the handle before the first callback.
moeflux_status moeflux_submit(const moeflux_model *model,
                              const uint32_t *prompt,
                              size_t count,
                              const char *request_json,
                              size_t request_len,
                              moeflux_on_delta on_delta,
                              moeflux_on_end on_end,
                              void *user,
                              moeflux_request **out);

// Ends a request at its next step: MOEFLUX_CANCELLED. Any thread may call it.
void moeflux_request_cancel(const moeflux_request *request);

// Frees a request. Cancels it if it runs, and waits for the end of its `on_end`, unless a callback
// of the request calls it. From a callback free no other request: two that free each other wait
// for ever.
void moeflux_request_free(moeflux_request *request);

// Sends messages of the library up to a level, from 1 (errors) to 5 (traces), to `receiver`. NULL
// is none, as at first. Once it returns, the former receiver is not called any more.
void moeflux_log(moeflux_on_message receiver, int32_t level, void *user);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

// Writes the defaults of the header that the program is compiled with.
static inline void moeflux_open_options_init(moeflux_open_options *options) {
  moeflux_open_options_init_sized(options, sizeof *options);
}

#endif
