/* A stand-in for the CUDA driver, for tests on machines without a device. Device memory is host memory. What is
 * submitted to a stream happens only when somebody waits for it, as late as it may; what is asked for without a bound
 * context fails. Calls are logged, one word and its numbers a line, and can be made to fail. */
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum kind { COPY, FILL, WAIT };
struct event;
struct operation { enum kind kind; char *target; const char *source; size_t length; int value; struct event *event; };
struct stream { int number; size_t submitted, done, room; struct operation *operations; };
struct event { int number; struct stream *stream; size_t position; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t released = PTHREAD_COND_INITIALIZER;
static int held;
static __thread int depth;
static struct stream default_stream;
static int streams, events, retained;
static char log_text[1 << 16], failing[64];
static size_t log_length;
static int failure;

static void note(const char *word, size_t number) {
    if (log_length < sizeof log_text - 64)
        log_length += (size_t)sprintf(log_text + log_length, "%s %zu\n", word, number);
}

static int begin(const char *call, int needs_context) {
    pthread_mutex_lock(&lock);
    if (strcmp(call, failing) == 0) {
        failing[0] = 0;
        return failure;
    }
    return needs_context && depth == 0 ? 201 : 0;
}

static int end(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

static void run(struct stream *stream, size_t position) {
    while (stream->done < position) {
        struct operation *next = &stream->operations[stream->done++];
        if (next->kind == WAIT && next->event->stream)
            run(next->event->stream, next->event->position);
        if (next->kind == COPY)
            memcpy(next->target, next->source, next->length);
        if (next->kind == FILL)
            memset(next->target, next->value, next->length);
    }
}

static void submit(struct stream *stream, struct operation operation) {
    if (stream->submitted == stream->room) {
        stream->room = stream->room * 2 + 16;
        stream->operations = realloc(stream->operations, stream->room * sizeof operation);
    }
    stream->operations[stream->submitted++] = operation;
}

static struct stream *of(struct stream *stream) { return stream ? stream : &default_stream; }

/* With the lock, which others may take meanwhile. */
static void await_release(void) {
    while (held)
        pthread_cond_wait(&released, &lock);
}

/* For tests: the log since the last time; makes the next such call fail; work for a stream; whoever waits for what was
 * submitted is held up for as long as that is so. */
size_t fake_take_log(char *target, size_t room) {
    pthread_mutex_lock(&lock);
    size_t length = log_length < room ? log_length : room;
    memcpy(target, log_text, length);
    log_length = 0;
    pthread_mutex_unlock(&lock);
    return length;
}

void fake_fail(const char *call, int code) {
    strncpy(failing, call, sizeof failing - 1);
    failure = code;
}

void fake_fill(struct stream *stream, void *target, int value, size_t length) {
    pthread_mutex_lock(&lock);
    submit(of(stream), (struct operation){.kind = FILL, .target = target, .value = value, .length = length});
    pthread_mutex_unlock(&lock);
}

void fake_hold(int is_held) {
    pthread_mutex_lock(&lock);
    held = is_held;
    pthread_cond_broadcast(&released);
    pthread_mutex_unlock(&lock);
}

int fake_retained(void) { return retained; }

/* The driver's own. */
int cuInit(unsigned flags) { (void)flags; return 0; }

int cuGetErrorName(int code, const char **name) {
    *name = code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : code == 101 ? "CUDA_ERROR_INVALID_DEVICE" : "CUDA_ERROR_UNKNOWN";
    return 0;
}

int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 2 ? 0 : 101; }

int cuDevicePrimaryCtxRetain(void **context, int device) {
    int code = begin("cuDevicePrimaryCtxRetain", 0);
    *context = (void *)(size_t)(device + 1);
    retained += code == 0;
    return end(code);
}

int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; begin("", 0); retained--; return end(0); }

int cuCtxPushCurrent_v2(void *context) { (void)context; depth++; return 0; }

int cuCtxPopCurrent_v2(void **context) { *context = NULL; depth--; return depth < 0 ? 201 : 0; }

int cuMemHostRegister_v2(void *memory, size_t length, unsigned flags) {
    (void)memory;
    (void)flags;
    int code = begin("cuMemHostRegister", 1);
    if (code == 0) note("register", length);
    return end(code);
}

int cuMemHostUnregister(void *memory) {
    (void)memory;
    int code = begin("cuMemHostUnregister", 1);
    if (code == 0) note("unregister", 0);
    return end(code);
}

int cuStreamCreate(struct stream **stream, unsigned flags) {
    (void)flags;
    int code = begin("cuStreamCreate", 1);
    if (code == 0) {
        *stream = calloc(1, sizeof **stream);
        (*stream)->number = ++streams;
    }
    return end(code);
}

int cuStreamDestroy_v2(struct stream *stream) { (void)stream; return end(begin("cuStreamDestroy", 1)); }

int cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    (void)flags;
    int code = begin("cuStreamWaitEvent", 1);
    if (code == 0) {
        /* As the real one: what is waited for is what was recorded by now. */
        struct event *copy = malloc(sizeof *copy);
        *copy = *event;
        note("wait", (size_t)of(event->stream)->number);
        submit(of(stream), (struct operation){.kind = WAIT, .event = copy});
    }
    return end(code);
}

int cuStreamSynchronize(struct stream *stream) {
    int code = begin("cuStreamSynchronize", 1);
    if (code == 0) {
        await_release();
        note("settle", (size_t)of(stream)->number);
        run(of(stream), of(stream)->submitted);
    }
    return end(code);
}

int cuEventCreate(struct event **event, unsigned flags) {
    (void)flags;
    int code = begin("cuEventCreate", 1);
    if (code == 0) {
        *event = calloc(1, sizeof **event);
        (*event)->number = ++events;
    }
    return end(code);
}

int cuEventDestroy_v2(struct event *event) {
    int code = begin("cuEventDestroy", 1);
    if (code == 0) free(event);
    return end(code);
}

int cuEventRecord(struct event *event, struct stream *stream) {
    int code = begin("cuEventRecord", 1);
    if (code == 0) {
        event->stream = of(stream);
        event->position = event->stream->submitted;
        note("record", (size_t)event->stream->number);
    }
    return end(code);
}

int cuEventSynchronize(struct event *event) {
    int code = begin("cuEventSynchronize", 1);
    if (code == 0) {
        await_release();
        note("arrive", (size_t)event->stream->number);
        run(event->stream, event->position);
    }
    return end(code);
}

int cuMemcpyDtoHAsync_v2(void *target, unsigned long long source, size_t length, struct stream *stream) {
    int code = begin("cuMemcpyDtoHAsync", 1);
    if (code == 0) {
        note("copy", length);
        submit(of(stream), (struct operation){.kind = COPY, .target = target, .source = (const char *)source, .length = length});
    }
    return end(code);
}
