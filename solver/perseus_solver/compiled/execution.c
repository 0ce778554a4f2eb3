/* One iteration of plans whose clocks change late. `rehearsal/execution.py` describes the arguments.

Plans follow each other; of each the instructions are visited in topological order, in all samples. What is on its way
to the GPUs of a stage is in a queue: changes come into effect in the order of their calls.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { AFTER_BEGIN, IN_WAIT, AT, AT_END, LAUNCHED, AHEAD }; /* what the moment of a request counts from */
enum { BOTH, SPEED, POWER };                                /* what a change is in effect for */

typedef struct {
    double at;
    int32_t clock, part;
} Change;

typedef struct {
    int64_t rows, stages, clocks;
    const int64_t *order, *stage, *table; /* int[rows] */
    const int64_t *first, *near;          /* the edges into each row, int[rows + 1], and where they come from */
    const double *delay;                  /* float[edges] */
    const double *time, *power;           /* float[tables, clocks], float[tables, clocks, clocks] */
} Machine;

/* What plans ask for; requests of an instruction follow each other. */
typedef struct {
    const int64_t *first; /* int[plans × rows + 1] */
    const double *after, *share;
    const int32_t *clock, *moment;
} Requests;

typedef struct {
    int64_t gpus, slots;
    const double *work;          /* float[rows, samples] */
    const double *normal;        /* float[slots, rows, samples, gpus] */
    const double *p50, *sigma;   /* float[clocks] */
    double call, call_sigma;
} Luck;

/* What GPUs of all stages are in, by [plans, stages, samples]; queues are [plans, stages, room, samples]. */
typedef struct {
    int64_t room_before, room;    /* of the queues of before, and of now */
    const Change *queue_before;
    Change *queue;
    int32_t *asked;             /* int[plans, stages] */
    int32_t *clock, *power;     /* in effect */
    int32_t *head, *tail;       /* of the queue */
    double *called, *free, *last; /* when the last call began and ended, and when the last change comes into effect */
    double *begin, *end;        /* of the last instruction */
    double *elapsed;            /* float[plans, samples], the iteration of before; replaced by this one */
} Course;

typedef struct {
    double *energy, *computing, *below, *above, *calls; /* float[plans, samples] */
    double *begin, *end, *scatter;                      /* float[plans, rows] */
} Outcome;

/* How long changes take, of those that were asked about, for all plans: from the begin of the first call until the
   first GPU, the last, and the one that a sample follows has the new clock, and until the last call is over. */
typedef struct {
    int32_t *place; /* int[slots, rows, clocks], −1: not yet known */
    double *found;  /* float[known, 4, samples] */
    int64_t known, room;
} Takes;

static const double *takes_of(const Machine *m, const Luck *luck, int64_t samples, int64_t slot, int64_t row,
                              int32_t clock, Takes *takes) {
    const size_t size = 4 * (size_t)samples;
    int32_t *place = takes->place + (slot * m->rows + row) * m->clocks + clock;
    if (*place >= 0)
        return takes->found + (size_t)*place * size;
    if (takes->known == takes->room) {
        const int64_t room = 2 * takes->room + 64;
        double *found = realloc(takes->found, (size_t)room * size * sizeof *found);
        if (!found)
            return NULL;
        takes->found = found, takes->room = room;
    }
    *place = (int32_t)takes->known++;
    double *found = takes->found + (size_t)*place * size;
    const double *normal = luck->normal + (slot * m->rows + row) * samples * luck->gpus;
    const double p50 = luck->p50[clock], sigma = luck->sigma[clock];
    for (int64_t s = 0; s < samples; s++, normal += luck->gpus) {
        double first = INFINITY, last = -INFINITY, one = 0.0, calls = 0.0;
        for (int64_t gpu = 0; gpu < luck->gpus; gpu++) {
            const double each = p50 * exp(sigma * normal[gpu]) + calls;
            first = each < first ? each : first, last = each > last ? each : last;
            if (gpu == s % luck->gpus)
                one = each;
            /* Calls scatter as changes do, slow ones with slow ones, and each keeps those behind it waiting. */
            calls += luck->call * exp(luck->call_sigma * normal[gpu]);
        }
        found[s] = first, found[samples + s] = last, found[2 * samples + s] = one, found[3 * samples + s] = calls;
    }
    return found;
}

/* The GPUs of one stage in all samples. */
typedef struct {
    int64_t samples;
    int32_t *clock, *power, *head, *tail;
    double *called, *free, *last, *begin, *end;
    double *next; /* when the next change comes into effect */
    double *host; /* when the host has launched all so far */
    Change *queue;
    int64_t *coming; /* changes that are on their way, in all samples; where none is, all GPUs are at the asked clock */
} Stage;

static inline void take_effect(Stage *g, int64_t s) {
    const Change *change = g->queue + g->head[s] * g->samples + s;
    if (change->part != POWER)
        g->clock[s] = change->clock;
    if (change->part != SPEED)
        g->power[s] = change->clock;
    --*g->coming;
    if (++g->head[s] < g->tail[s])
        g->next[s] = change[g->samples].at;
    else
        g->head[s] = g->tail[s] = 0, g->next[s] = INFINITY;
}

static inline void wait_for(Stage *g, const double *begin) {
    for (int64_t s = 0; s < g->samples && *g->coming; s++)
        while (g->next[s] <= begin[s])
            take_effect(g, s);
}

/* Add a change behind those that are on their way. */
static inline void come(Stage *g, int64_t s, double at, int32_t clock, int32_t part) {
    at = at > g->last[s] ? at : g->last[s];
    g->queue[g->tail[s] * g->samples + s] = (Change){at, clock, part};
    g->last[s] = at;
    ++*g->coming;
    if (g->tail[s]++ == g->head[s])
        g->next[s] = at;
}

/* Ask for a clock at the moments `due`; `steps` is 2 where GPUs change one after another. */
static void ask(Stage *g, const double *due, int32_t clock, int rises, int steps, const double *takes, double *calls) {
    const int64_t samples = g->samples;
    const double *first = takes, *last = first + samples, *one = last + samples, *over = one + samples;
    for (int64_t s = 0; s < samples; s++) {
        if (g->called[s] > due[s] && g->tail[s] > g->head[s]) {
            /* A call that waits for the one before it is made with the new target. */
            for (int32_t step = 1; step <= steps && step <= g->tail[s] - g->head[s]; step++)
                g->queue[(g->tail[s] - step) * samples + s].clock = clock;
            continue;
        }
        const double start = due[s] > g->free[s] ? due[s] : g->free[s];
        const double speed = start + (rises ? last[s] : first[s]);
        g->called[s] = start, g->free[s] = start + over[s];
        if (steps == 1)
            come(g, s, speed, clock, BOTH);
        else {
            const double power = start + one[s];
            come(g, s, speed < power ? speed : power, clock, rises ? POWER : SPEED);
            come(g, s, speed < power ? power : speed, clock, rises ? SPEED : POWER);
        }
        calls[s]++;
    }
}

/* When a request is made. */
static void due_of(const Requests *r, int64_t k, Stage *g, const double *begin, const double *takes, double *due) {
    const double after = r->after[k], share = r->share ? r->share[k] : 0.0;
    for (int64_t s = 0; s < g->samples; s++)
        switch (r->moment[k]) {
        case AFTER_BEGIN:
            due[s] = begin[s] + after;
            break;
        case IN_WAIT:
            due[s] = g->begin[s] + after;
            due[s] = due[s] < begin[s] ? due[s] : begin[s];
            break;
        case AT:
            due[s] = after;
            break;
        case AT_END:
            due[s] = g->end[s];
            break;
        case LAUNCHED:
            due[s] = begin[s] + (after < takes[s] ? after : takes[s]);
            break;
        default:
            due[s] = g->host[s] + after;
            if (share >= 0 && begin[s] + share * takes[s] > due[s])
                due[s] = begin[s] + share * takes[s];
            g->host[s] = due[s];
        }
}

/* The sum of numbers, pair by pair. */
static double sum(const double *values, int64_t count) {
    if (count < 8) {
        double total = 0.0;
        for (int64_t k = 0; k < count; k++)
            total += values[k];
        return total;
    }
    if (count > 128) {
        const int64_t half = count / 2 - count / 2 % 8;
        return sum(values, half) + sum(values + half, count - half);
    }
    double part[8];
    int64_t k = 8;
    for (int j = 0; j < 8; j++)
        part[j] = values[j];
    for (; k + 8 <= count; k += 8)
        for (int j = 0; j < 8; j++)
            part[j] += values[k + j];
    double total = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
    for (; k < count; k++)
        total += values[k];
    return total;
}

static double deviation(const double *values, double mean, int64_t count, double *squares) {
    for (int64_t s = 0; s < count; s++)
        squares[s] = (values[s] - mean) * (values[s] - mean);
    return sqrt(sum(squares, count) / (double)count);
}

/* Work arrays of one plan; all are float[…, samples] but what is on its way to each stage. */
typedef struct {
    double *ends, *next, *host, *begin, *takes, *due;
    int64_t *coming;
} Scratch;

/* Do the work of an instruction while no clock changes. */
static void work_at(int64_t samples, const double *restrict left, double time, double power,
                    const double *restrict begin, double *restrict ends, double *restrict energy,
                    double *restrict computing, double *restrict beside) {
    for (int64_t s = 0; s < samples; s++) {
        ends[s] = begin[s] + left[s] * time;
        energy[s] += (ends[s] - begin[s]) * power;
        computing[s] += ends[s] - begin[s];
    }
    for (int64_t s = 0; s < samples && beside; s++)
        beside[s] += ends[s] - begin[s];
}

/* Do the work of an instruction, from one clock in effect to the next. */
static void work(const Machine *m, const Luck *luck, int64_t row, int64_t planned, int32_t asked, Stage *g,
                 const double *begin, double *ends, const Outcome *o, int64_t plan) {
    const int64_t samples = g->samples, first = m->table[row] * m->clocks;
    const double *left_of = luck->work + row * samples;
    double *energy = o->energy + plan * samples, *computing = o->computing + plan * samples;
    double *below = o->below + plan * samples, *above = o->above + plan * samples;
    if (!*g->coming) {
        double *beside = asked < planned ? below : asked > planned && planned >= 0 ? above : NULL;
        work_at(samples, left_of, m->time[first + asked], m->power[(first + asked) * m->clocks + asked], begin, ends,
                energy, computing, beside);
        return;
    }
    for (int64_t s = 0; s < samples; s++) {
        double from = begin[s], left = left_of[s];
        for (;;) {
            const int64_t clock = g->clock[s], place = first + clock;
            const double time = m->time[place], end = from + left * time, next = g->next[s];
            const double until = next < end ? next : end, seconds = until - from;
            energy[s] += seconds * m->power[place * m->clocks + g->power[s]];
            computing[s] += seconds;
            if (clock < planned)
                below[s] += seconds;
            else if (clock > planned && planned >= 0)
                above[s] += seconds;
            if (!(next < end)) {
                ends[s] = end;
                break;
            }
            left -= seconds / time;
            from = until;
            take_effect(g, s);
        }
    }
}

/* Begin an iteration: count times from its begin. */
static void renew(const Course *c, int64_t samples, int64_t at, const double *elapsed, Stage *g) {
    const Change *waiting = c->queue_before + at * c->room_before * samples;
    *g->coming = 0;
    for (int64_t s = 0; s < samples; s++) {
        const int32_t head = g->head[s], count = g->tail[s] - head;
        for (int32_t k = 0; k < count; k++) {
            Change change = waiting[(head + k) * samples + s];
            change.at -= elapsed[s];
            g->queue[k * samples + s] = change;
        }
        g->head[s] = 0, g->tail[s] = count, *g->coming += count;
        g->next[s] = count ? g->queue[s].at : INFINITY;
        g->called[s] -= elapsed[s], g->free[s] -= elapsed[s], g->last[s] -= elapsed[s];
        g->begin[s] -= elapsed[s], g->end[s] -= elapsed[s];
        g->host[s] = 0.0; /* the host begins the iteration with the GPU */
    }
}

static Stage stage_of(const Course *c, const Scratch *w, int64_t samples, int64_t stage, int64_t at) {
    const int64_t first = at * samples;
    return (Stage){samples,           c->clock + first, c->power + first, c->head + first,
                   c->tail + first,   c->called + first, c->free + first, c->last + first,
                   c->begin + first,  c->end + first,   w->next + stage * samples, w->host + stage * samples,
                   c->queue + at * c->room * samples, w->coming + stage};
}

/* Execute an iteration of one plan; return whether memory was lacking. */
static int iterate(const Machine *m, int64_t plan, int64_t samples, const int64_t *planned, double overhead, int steps,
                   const Requests *r, const Luck *luck, Course *c, const Outcome *o, Takes *takes, const Scratch *w) {
    double *elapsed = c->elapsed + plan * samples, *calls = o->calls + plan * samples;
    for (int64_t stage = 0; stage < m->stages; stage++) {
        Stage g = stage_of(c, w, samples, stage, plan * m->stages + stage);
        renew(c, samples, plan * m->stages + stage, elapsed, &g);
    }
    memset(elapsed, 0, (size_t)samples * sizeof *elapsed);
    for (int64_t i = 0; i < m->rows; i++) {
        const int64_t row = m->order[i], at = plan * m->stages + m->stage[row], cell = plan * m->rows + row;
        Stage g = stage_of(c, w, samples, m->stage[row], at);
        double *begin = w->begin, *ends = w->ends + row * samples;
        memset(begin, 0, (size_t)samples * sizeof *begin);
        for (int64_t e = m->first[row]; e < m->first[row + 1]; e++) {
            const double *near = w->ends + m->near[e] * samples, delay = m->delay[e];
            for (int64_t s = 0; s < samples; s++)
                begin[s] = near[s] + delay > begin[s] ? near[s] + delay : begin[s];
        }
        wait_for(&g, begin);
        if (r->first[cell] < r->first[cell + 1]) {
            for (int64_t s = 0; s < samples; s++)
                w->takes[s] = luck->work[row * samples + s] * m->time[m->table[row] * m->clocks + g.clock[s]];
            for (int64_t k = r->first[cell]; k < r->first[cell + 1]; k++) {
                const int32_t clock = r->clock[k], before = c->asked[at];
                due_of(r, k, &g, begin, w->takes, w->due);
                if (clock < 0 || clock == before)
                    continue;
                const double *takes_s = takes_of(m, luck, samples, k - r->first[cell], row, clock, takes);
                if (!takes_s)
                    return 1;
                ask(&g, w->due, clock, clock > before, steps, takes_s, calls);
                c->asked[at] = clock;
            }
            wait_for(&g, begin);
        }
        work(m, luck, row, planned[cell], c->asked[at], &g, begin, ends, o, plan);
        for (int64_t s = 0; s < samples; s++)
            elapsed[s] = ends[s] > elapsed[s] ? ends[s] : elapsed[s];
        memcpy(g.begin, begin, (size_t)samples * sizeof *begin);
        memcpy(g.end, ends, (size_t)samples * sizeof *begin);
        const double mean = sum(begin, samples) / (double)samples;
        o->begin[cell] = mean, o->end[cell] = sum(ends, samples) / (double)samples;
        if (o->scatter)
            o->scatter[cell] = deviation(begin, mean, samples, w->due);
    }
    for (int64_t s = 0; s < samples; s++)
        elapsed[s] += overhead;
    return 0;
}

/* When the instructions of plans begin and end that wait for nothing but their predecessors; float[plans, rows] each. */
void execution_times(const Machine *m, int64_t plans, const double *takes, double *begin, double *end) {
    for (int64_t plan = 0; plan < plans; plan++, takes += m->rows, begin += m->rows, end += m->rows)
        for (int64_t i = 0; i < m->rows; i++) {
            const int64_t row = m->order[i];
            double ready = 0.0;
            for (int64_t e = m->first[row]; e < m->first[row + 1]; e++) {
                const double at = end[m->near[e]] + m->delay[e];
                ready = at > ready ? at : ready;
            }
            begin[row] = ready, end[row] = ready + takes[row];
        }
}

/* Execute an iteration of all plans; return whether memory was lacking. */
int execution_iterate(const Machine *m, int64_t plans, int64_t samples, const int64_t *planned, double overhead,
                      int32_t steps, const Requests *r, const Luck *luck, Course *c, const Outcome *o) {
    const size_t line = (size_t)samples, places = (size_t)(luck->slots * m->rows * m->clocks);
    Takes takes = {malloc(places * sizeof(int32_t) + 1), NULL, 0, 0};
    double *all = malloc((size_t)(m->rows + 2 * m->stages + 3) * line * sizeof *all);
    int64_t *coming = malloc((size_t)m->stages * sizeof *coming);
    int failed = !takes.place || !all || !coming;
    if (!failed) {
        double *stages = all + (size_t)m->rows * line, *others = stages + 2 * (size_t)m->stages * line;
        const Scratch w = {all,    stages, stages + (size_t)m->stages * line, others, others + line,
                           others + 2 * line, coming};
        memset(takes.place, 0xff, places * sizeof(int32_t));
        for (int64_t plan = 0; plan < plans && !failed; plan++)
            failed = iterate(m, plan, samples, planned, overhead, steps, r, luck, c, o, &takes, &w);
    }
    free(takes.place), free(takes.found), free(all), free(coming);
    return failed;
}
