/* Calls every function of the library. The line of a check that fails is the exit's text. */
#include <math.h>
#include <moeflux.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                          \
  do {                                                                                            \
    if (!(condition)) {                                                                           \
      printf("line %d: %s: %s\n", __LINE__, #condition, moeflux_error_message());                 \
      exit(1);                                                                                    \
    }                                                                                             \
  } while (0)
#define OK(call) CHECK((call) == MOEFLUX_OK)
#define SAYS(part) CHECK(strstr(moeflux_error_message(), part) != NULL)

static const char *const MESSAGES =
    "[{\"role\":\"user\",\"content\":\"Tell me the fable of The Fox and the Crow.\"}]";
static const char *const GREEDY = "{\"temperature\":0,\"max_tokens\":24}";

struct seen {
  char text[4096];
  size_t parts, tokens;
  double progress;
  size_t stop_after;
  moeflux_session *session;
  moeflux_status of_session;
};

/* What a callback does once. */
enum deed { CLOSE, FORK, WAIT };

struct doer {
  enum deed deed;
  moeflux_model *model;
  int started[2], go[2];
  bool is_done;
};

static bool act(void *user, const moeflux_delta *delta) {
  struct doer *doer = user;
  char go;
  if (delta->part != MOEFLUX_TEXT) return true;
  if (!doer->is_done) {
    doer->is_done = true;
    /* Parts that wait for this one fill their channel. */
    nanosleep(&(struct timespec){0, 200000000}, NULL);
    if (doer->deed == CLOSE) moeflux_model_close(doer->model);
    if (doer->deed == FORK && fork() == 0) doer->model = NULL;
    if (doer->deed == WAIT) {
      CHECK(write(doer->started[1], "", 1) == 1);
      CHECK(read(doer->go[0], &go, 1) == 1);
    }
  }
  return true;
}

static bool see(void *user, const moeflux_delta *delta) {
  struct seen *seen = user;
  CHECK(delta->size >= sizeof *delta);
  CHECK(strlen(delta->text) == delta->len);
  CHECK(delta->progress >= seen->progress);
  seen->progress = delta->progress;
  seen->tokens += delta->token_count;
  if (delta->part == MOEFLUX_TEXT) {
    seen->parts++;
    strcat(seen->text, delta->text);
  }
  if (seen->session != NULL) seen->of_session = moeflux_session_feed(seen->session, NULL, 0, NULL);
  return seen->stop_after == 0 || seen->parts < seen->stop_after;
}

struct ended {
  struct seen seen;
  pthread_mutex_t lock;
  pthread_cond_t changed;
  int ends;
  moeflux_status status;
  char answer[65536];
  moeflux_request *free_at_end;
};

static bool see_part(void *user, const moeflux_delta *delta) {
  return see(&((struct ended *)user)->seen, delta);
}

static void see_end(void *user, moeflux_status status, const char *answer) {
  struct ended *ended = user;
  pthread_mutex_lock(&ended->lock);
  ended->ends++;
  ended->status = status;
  snprintf(ended->answer, sizeof ended->answer, "%s", answer);
  if (ended->free_at_end != NULL) moeflux_request_free(ended->free_at_end);
  pthread_cond_signal(&ended->changed);
  pthread_mutex_unlock(&ended->lock);
}

static struct ended *new_ended(void) {
  struct ended *ended = calloc(1, sizeof *ended);
  pthread_mutex_init(&ended->lock, NULL);
  pthread_cond_init(&ended->changed, NULL);
  return ended;
}

static void wait_for(struct ended *ended) {
  pthread_mutex_lock(&ended->lock);
  while (ended->ends == 0) pthread_cond_wait(&ended->changed, &ended->lock);
  pthread_mutex_unlock(&ended->lock);
}

static void take_message(void *user, int32_t level, const char *message) {
  CHECK(level >= 1 && level <= 3 && message[0] != 0);
  ++*(int *)user;
}

static bool refuse(void *user, uint64_t done, uint64_t total) {
  (void)done;
  (void)total;
  ++*(int *)user;
  return false;
}

static moeflux_model *open_model(uint32_t sessions) {
  moeflux_open_options options;
  moeflux_model *model;
  moeflux_open_options_init(&options);
  CHECK(options.size == sizeof options && options.grammars && !options.exact);
  options.memory = 512u << 20;
  options.device = "cpu";
  options.exact = true;
  options.context = 512;
  options.sessions = sessions;
  OK(moeflux_model_open("tales-18m", &options, &model));
  return model;
}

static void versions_and_errors(void) {
  moeflux_model *model = NULL;
  moeflux_open_options options;
  char bad[] = {(char)0xff, 0};
  CHECK(moeflux_api_version() == (MOEFLUX_API_MAJOR << 16 | MOEFLUX_API_MINOR));
  CHECK(moeflux_version()[0] >= '0');
  CHECK(strcmp(moeflux_status_name(MOEFLUX_MEMORY), "MEMORY") == 0);
  CHECK(strcmp(moeflux_status_name(12345), "UNKNOWN") == 0);
  CHECK(moeflux_model_open(NULL, NULL, &model) == MOEFLUX_INVALID);
  SAYS("path is NULL");
  CHECK(moeflux_model_open("tales-18m", NULL, NULL) == MOEFLUX_INVALID);
  CHECK(moeflux_model_open(bad, NULL, &model) == MOEFLUX_INVALID);
  SAYS("UTF-8");
  CHECK(moeflux_model_open("no/where", NULL, &model) == MOEFLUX_FILE);
  SAYS("no/where");
  moeflux_open_options_init(&options);
  CHECK(moeflux_error_message()[0] != 0);
  options.device = "abacus";
  CHECK(moeflux_model_open("tales-18m", &options, &model) == MOEFLUX_UNSUPPORTED);
  SAYS("abacus");
  moeflux_open_options_init(&options);
  options.memory = 1;
  CHECK(moeflux_model_open("tales-18m", &options, &model) == MOEFLUX_MEMORY);
  SAYS("give memory");
  options.size = 0;
  CHECK(moeflux_model_open("tales-18m", &options, &model) == MOEFLUX_INVALID);
  SAYS("options.size is 0");
  CHECK(model == NULL);
}

static void opening(void) {
  moeflux_open_options options;
  moeflux_model *model = NULL;
  char *json;
  int calls = 0, messages = 0;
  /* An older program knows fewer fields: the others have their defaults. */
  memset(&options, 0xff, sizeof options);
  moeflux_open_options_init_sized(&options, offsetof(moeflux_open_options, context));
  CHECK(options.size == offsetof(moeflux_open_options, context) && options.context == 0xffffffff);
  options.memory = 512u << 20;
  options.device = "cpu";
  OK(moeflux_inspect("tales-18m", &options, &json));
  CHECK(strstr(json, "\"slots\"") != NULL && strstr(json, "\"grammars\"") != NULL);
  moeflux_string_free(json);
  moeflux_open_options_init(&options);
  options.device = "cpu";
  moeflux_log(take_message, 3, &messages);
  options.memory = 512u << 20;
  OK(moeflux_model_open("tales-18m", &options, &model));
  moeflux_model_free(model);
  model = NULL;
  CHECK(messages > 0);
  moeflux_log(NULL, 0, NULL);
  options.progress = refuse;
  options.user = &calls;
  moeflux_status status = moeflux_model_open("tales-18m", &options, &model);
  /* A model that opens at once asks nobody. */
  CHECK(calls == 0 ? status == MOEFLUX_OK : status == MOEFLUX_CANCELLED);
  moeflux_model_free(model);
}

static void text(const moeflux_model *model) {
  uint32_t tokens[64], again[64], few[2];
  size_t count, more, len;
  char back[64];
  const char *fable = "A Fox saw a Crow.";
  OK(moeflux_encode(model, fable, MOEFLUX_NUL, false, tokens, 64, &count));
  OK(moeflux_encode(model, "A Fox saw a Crow. And", strlen(fable), false, again, 64, &more));
  CHECK(count == more && memcmp(tokens, again, count * sizeof *tokens) == 0);
  OK(moeflux_encode(model, fable, MOEFLUX_NUL, false, few, 2, &more));
  CHECK(more == count && few[1] == tokens[1]);
  OK(moeflux_decode(model, tokens, count, false, back, sizeof back, &len));
  CHECK(len == strlen(fable) && strcmp(back, fable) == 0);
  OK(moeflux_decode(model, tokens, count, false, back, 6, &len));
  CHECK(len == strlen(fable) && strcmp(back, "A Fox") == 0);
  OK(moeflux_decode(model, tokens, count, false, NULL, 0, &len));
  few[0] = 4000000000u;
  CHECK(moeflux_decode(model, few, 1, false, back, sizeof back, &len) != MOEFLUX_INTERNAL);
  CHECK(moeflux_chat_tokens(model, "[{}]", MOEFLUX_NUL, NULL, 0, tokens, 64, &count) ==
        MOEFLUX_INVALID);
  SAYS("role");
  CHECK(moeflux_chat_tokens(model, "{", MOEFLUX_NUL, NULL, 0, tokens, 64, &count) ==
        MOEFLUX_INVALID);
}

static void sessions(const moeflux_model *model) {
  uint32_t tokens[256], next;
  size_t count, held, width, again;
  moeflux_session *session, *fork, *third = NULL;
  moeflux_mark *mark;
  moeflux_synced synced = {sizeof synced, 0, 0, 0, 0};
  struct { size_t size; uint64_t reused; uint64_t after; } older = {2 * sizeof(size_t), 0, 7};
  const float *logits;
  float *kept;
  OK(moeflux_chat_tokens(model, MESSAGES, MOEFLUX_NUL, NULL, 0, tokens, 256, &count));
  OK(moeflux_session_new(model, &session));
  CHECK(moeflux_session_logits(session, &width) != NULL && width == 0);
  synced.size = 0;
  CHECK(moeflux_session_sync(session, tokens, count, NULL, &synced) == MOEFLUX_INVALID);
  synced.size = sizeof synced;
  OK(moeflux_session_sync(session, tokens, count, NULL, &synced));
  CHECK(synced.computed + synced.restored == count);
  OK(moeflux_session_sync(session, tokens, count, NULL, (moeflux_synced *)&older));
  CHECK(older.reused == count && older.after == 7);
  logits = moeflux_session_logits(session, &width);
  CHECK(width == moeflux_model_vocab(model));
  kept = malloc(width * sizeof *kept);
  memcpy(kept, logits, width * sizeof *kept);
  for (next = 0, held = 1; held < width; held++)
    if (logits[held] > logits[next]) next = (uint32_t)held;
  OK(moeflux_session_mark(session, &mark));
  OK(moeflux_session_fork(session, &fork));
  CHECK(moeflux_session_new(model, &third) == MOEFLUX_CONTEXT && third == NULL);
  OK(moeflux_session_feed(session, &next, 1, NULL));
  CHECK(moeflux_session_tokens(session, &held)[count] == next && held == count + 1);
  OK(moeflux_session_save(session, "session.mfx"));
  OK(moeflux_session_rewind(session, mark));
  logits = moeflux_session_logits(session, &again);
  CHECK(again == width && memcmp(kept, logits, width * sizeof *kept) == 0);
  OK(moeflux_session_restore(session, "session.mfx"));
  CHECK(moeflux_session_tokens(session, &held) != NULL && held == count + 1);
  OK(moeflux_session_truncate(session, count, NULL, NULL));
  CHECK(moeflux_session_restore(session, "nowhere.mfx") != MOEFLUX_OK);
  OK(moeflux_session_feed(fork, &next, 1, NULL));
  next = moeflux_model_vocab(model);
  CHECK(moeflux_session_feed(fork, &next, 1, NULL) == MOEFLUX_CONTEXT);
  CHECK(moeflux_session_feed(fork, NULL, 1, NULL) == MOEFLUX_INVALID);
  moeflux_cancel *cancel = moeflux_cancel_new();
  moeflux_cancel_set(cancel);
  CHECK(moeflux_session_sync(fork, tokens, count, cancel, NULL) == MOEFLUX_CANCELLED);
  moeflux_cancel_reset(cancel);
  OK(moeflux_session_sync(fork, tokens, count, cancel, NULL));
  moeflux_cancel_free(cancel);
  moeflux_mark_free(mark);
  moeflux_session_free(fork);
  moeflux_session_free(session);
  free(kept);
}

static void answers(const moeflux_model *model) {
  uint32_t tokens[256];
  size_t count, held;
  char *json, *form;
  moeflux_session *session;
  struct seen seen = {0}, stopped = {0};
  OK(moeflux_chat_tokens(model, MESSAGES, MOEFLUX_NUL, NULL, 0, tokens, 256, &count));
  OK(moeflux_session_new(model, &session));
  seen.session = session;
  OK(moeflux_session_generate(session, tokens, count, GREEDY, MOEFLUX_NUL, NULL, see, &seen, &json));
  CHECK(strncmp(seen.text, "A Crow was sitting", 18) == 0);
  CHECK(strstr(json, "\"finish\":\"length\"") != NULL);
  CHECK(seen.of_session == MOEFLUX_BUSY && moeflux_error_message()[0] == 0);
  moeflux_string_free(json);
  CHECK(moeflux_session_tokens(session, &held) != NULL && held == count + 24);
  stopped.stop_after = 2;
  OK(moeflux_session_generate(session, tokens, count, GREEDY, MOEFLUX_NUL, NULL, see, &stopped,
                              &json));
  CHECK(stopped.parts == 2 && strstr(json, "\"finish\":\"stopped\"") != NULL);
  moeflux_string_free(json);
  OK(moeflux_session_generate(session, tokens, count,
                              "{\"response_format\":{\"type\":\"json_schema\",\"json_schema\":{"
                              "\"schema\":{\"enum\":[\"crow\",\"fox\"]}}},\"seed\":1,"
                              "\"logprobs\":true,\"top_logprobs\":2}",
                              MOEFLUX_NUL, NULL, NULL, NULL, &form));
  CHECK(strstr(form, "\"text\":\"\\\"crow\\\"\"") || strstr(form, "\"text\":\"\\\"fox\\\"\""));
  CHECK(strstr(form, "top_logprobs") != NULL);
  moeflux_string_free(form);
  CHECK(moeflux_session_generate(session, tokens, count, "{\"temprature\":0}", MOEFLUX_NUL, NULL,
                                 NULL, NULL, NULL) == MOEFLUX_INVALID);
  SAYS("temprature");
  CHECK(moeflux_session_generate(session, tokens, count, "{\"temperature\":-1}", MOEFLUX_NUL, NULL,
                                 NULL, NULL, NULL) == MOEFLUX_SAMPLING);
  moeflux_session_free(session);
}

static void requests(const moeflux_model *model) {
  uint32_t tokens[256];
  size_t count;
  moeflux_request *request, *second;
  struct ended *a = new_ended(), *b = new_ended(), *c = new_ended();
  OK(moeflux_chat_tokens(model, MESSAGES, MOEFLUX_NUL, NULL, 0, tokens, 256, &count));
  OK(moeflux_submit(model, tokens, count, GREEDY, MOEFLUX_NUL, see_part, see_end, a, &request));
  OK(moeflux_submit(model, tokens, count, GREEDY, MOEFLUX_NUL, see_part, see_end, b, &second));
  wait_for(a);
  wait_for(b);
  CHECK(a->status == MOEFLUX_OK && strncmp(a->seen.text, "A Crow was sitting", 18) == 0);
  CHECK(strcmp(a->seen.text, b->seen.text) == 0 && a->seen.tokens <= 24 && a->seen.tokens > 12);
  moeflux_request_free(request);
  moeflux_request_free(second);
  CHECK(a->ends == 1 && b->ends == 1);
  OK(moeflux_submit(model, tokens, count, "{\"temperature\":0,\"logit_bias\":{\"0\":-100}}",
                    MOEFLUX_NUL, NULL, see_end, c, &request));
  moeflux_request_cancel(request);
  wait_for(c);
  CHECK(c->status == MOEFLUX_CANCELLED && c->ends == 1);
  moeflux_request_free(request);
  /* Freed by its own callback. */
  memset(&a->seen, 0, sizeof a->seen);
  a->ends = 0;
  pthread_mutex_lock(&a->lock);
  OK(moeflux_submit(model, tokens, count, GREEDY, MOEFLUX_NUL, NULL, see_end, a, &request));
  a->free_at_end = request;
  pthread_mutex_unlock(&a->lock);
  wait_for(a);
  CHECK(a->status == MOEFLUX_OK);
  free(a);
  free(b);
  free(c);
}

static void embeddings(const moeflux_model *model) {
  uint32_t tokens[8] = {5, 6, 7, 8, 9, 10, 11, 12};
  size_t hidden = moeflux_model_hidden(model), i;
  float *row = calloc(hidden, sizeof *row), norm = 0;
  OK(moeflux_embed(model, tokens, 8, "mean", true, row, hidden));
  for (i = 0; i < hidden; i++) norm += row[i] * row[i];
  CHECK(norm > 0.999f && norm < 1.001f);
  OK(moeflux_embed(model, tokens, 8, "first", false, row, hidden));
  CHECK(moeflux_embed(model, tokens, 8, "sum", false, row, hidden) == MOEFLUX_INVALID);
  CHECK(moeflux_embed(model, tokens, 8, "mean", false, row, hidden - 1) == MOEFLUX_INVALID);
  free(row);
}

static void *cancel_later(void *cancel) {
  nanosleep(&(struct timespec){0, 3000000}, NULL);
  moeflux_cancel_set(cancel);
  return NULL;
}

static void cancelling(const moeflux_model *model) {
  uint32_t tokens[500];
  moeflux_session *session;
  moeflux_cancel *cancel = moeflux_cancel_new();
  moeflux_status status = MOEFLUX_OK;
  pthread_t thread;
  size_t held = 0;
  int tries;
  for (size_t i = 0; i < 500; i++) tokens[i] = (uint32_t)i % 400 + 1;
  OK(moeflux_session_new(model, &session));
  for (tries = 0; tries < 100 && status != MOEFLUX_CANCELLED; tries++) {
    moeflux_cancel_reset(cancel);
    OK(moeflux_session_sync(session, tokens, 1, NULL, NULL));
    CHECK(pthread_create(&thread, NULL, cancel_later, cancel) == 0);
    status = moeflux_session_sync(session, tokens, 500, cancel, NULL);
    pthread_join(thread, NULL);
  }
  CHECK(status == MOEFLUX_CANCELLED);
  CHECK(moeflux_session_tokens(session, &held) != NULL && held < 500);
  moeflux_cancel_reset(cancel);
  OK(moeflux_session_sync(session, tokens, 500, cancel, NULL));
  moeflux_cancel_free(cancel);
  moeflux_session_free(session);
}

struct answer {
  moeflux_session *session;
  struct doer doer;
  moeflux_status status;
};

static void *generate(void *of) {
  struct answer *answer = of;
  uint32_t tokens[256];
  size_t count;
  OK(moeflux_chat_tokens(answer->doer.model, MESSAGES, MOEFLUX_NUL, NULL, 0, tokens, 256, &count));
  answer->status = moeflux_session_generate(answer->session, tokens, count, GREEDY, MOEFLUX_NUL,
                                            NULL, act, &answer->doer, NULL);
  return NULL;
}

static void callbacks(void) {
  moeflux_model *model = open_model(2);
  struct answer answer = {.doer = {.deed = WAIT, .model = model}};
  uint32_t token = 5;
  size_t count;
  int ends[2];
  char forked = 0;
  pid_t parent = getpid();
  pthread_t thread;
  OK(moeflux_session_new(model, &answer.session));
  CHECK(pipe(answer.doer.started) == 0 && pipe(answer.doer.go) == 0 && pipe(ends) == 0);
  /* The session is busy while its callback waits for this thread. */
  CHECK(pthread_create(&thread, NULL, generate, &answer) == 0);
  CHECK(read(answer.doer.started[0], &forked, 1) == 1);
  CHECK(moeflux_session_feed(answer.session, &token, 1, NULL) == MOEFLUX_BUSY);
  CHECK(moeflux_session_logits(answer.session, &count) == NULL && count == 0);
  CHECK(write(answer.doer.go[1], "", 1) == 1);
  pthread_join(thread, NULL);
  OK(answer.status);
  /* A callback that forks: both processes return. */
  answer.doer = (struct doer){.deed = FORK, .model = model};
  generate(&answer);
  if (getpid() != parent) {
    forked = answer.status == MOEFLUX_FORKED;
    if (write(ends[1], &forked, 1) != 1) _exit(1);
    kill(getpid(), SIGKILL);
  }
  OK(answer.status);
  CHECK(read(ends[0], &forked, 1) == 1 && forked == 1);
  CHECK(waitpid(-1, NULL, 0) > 0);
  /* A callback that closes the model. */
  answer.doer = (struct doer){.deed = CLOSE, .model = model};
  generate(&answer);
  CHECK(answer.status == MOEFLUX_CLOSED);
  moeflux_session_free(answer.session);
  moeflux_model_free(model);
}

static void forks_and_ends(moeflux_model *model) {
  moeflux_session *session, *lasting;
  char *json;
  int ends[2];
  char right = 0;
  pid_t child;
  uint32_t token = 5;
  OK(moeflux_session_new(model, &session));
  CHECK(pipe(ends) == 0);
  child = fork();
  if (child == 0) {
    right = moeflux_session_feed(session, &token, 1, NULL) == MOEFLUX_FORKED &&
            moeflux_model_vocab(model) == 0;
    moeflux_session_free(session);
    moeflux_model_close(model);
    moeflux_model_free(model);
    if (write(ends[1], &right, 1) != 1) _exit(1);
    /* What it has not freed is no leak: it is the memory of its parent. */
    kill(getpid(), SIGKILL);
  }
  CHECK(read(ends[0], &right, 1) == 1 && right == 1);
  CHECK(waitpid(child, NULL, 0) == child);
  close(ends[0]);
  close(ends[1]);
  OK(moeflux_model_describe(model, &json));
  CHECK(strstr(json, "\"digest\"") != NULL && strstr(json, "\"stats\"") != NULL);
  moeflux_string_free(json);
  OK(moeflux_session_new(model, &lasting));
  moeflux_model_close(model);
  CHECK(moeflux_session_feed(session, &token, 1, NULL) == MOEFLUX_CLOSED);
  CHECK(moeflux_session_new(model, &lasting) == MOEFLUX_CLOSED);
  CHECK(moeflux_model_hidden(model) == 0);
  moeflux_model_free(model);
  moeflux_session_free(session);
  moeflux_session_free(lasting);
  /* A session keeps its model. */
  model = open_model(1);
  OK(moeflux_session_new(model, &session));
  moeflux_model_free(model);
  OK(moeflux_session_feed(session, &token, 1, NULL));
  moeflux_session_free(session);
  moeflux_model_free(NULL);
  moeflux_session_free(NULL);
  moeflux_mark_free(NULL);
  moeflux_cancel_free(NULL);
  moeflux_request_free(NULL);
  moeflux_string_free(NULL);
  CHECK(moeflux_session_new(NULL, &session) == MOEFLUX_INVALID);
}

int main(void) {
  versions_and_errors();
  opening();
  moeflux_model *model = open_model(2);
  CHECK(moeflux_model_context(model) == 512);
  text(model);
  sessions(model);
  answers(model);
  requests(model);
  cancelling(model);
  embeddings(model);
  callbacks();
  forks_and_ends(model);
  return 0;
}
